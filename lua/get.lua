-- get: reads the record and its remaining time to live.
--
-- KEYS
--   record             the record of the key or of one message, or an entry
-- ARGV
-- REPLIES
--   found              its time to live in milliseconds (-1: no expiry), a space, and the record
--   absent             there is no record, or only the attempts of one, which follow

local record = KEYS[1]

read_clock()
local raw = redis.call('GET', record)
local _, _, _, _, _, _, _, owner, _, position = unpack_record(raw)
if not raw or is_remnant(owner, raw, position) then
  return reply('absent', raw)
end
return reply('found', redis.call('PTTL', record) .. ' ' .. raw)
