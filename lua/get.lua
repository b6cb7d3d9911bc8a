-- get: reads the record and its remaining time to live.
--
-- KEYS
--   record             the key's record
-- ARGV
-- REPLIES
--   found              its time to live in milliseconds (-1: no expiry), a space, and the record
--   absent             there is no record, or one with errors of ended task ids only, which follows

local record = KEYS[1]

read_clock()
local raw = redis.call('GET', record)
if not raw or string.sub(raw, 1, 1) == 'E' then
  return reply('absent', raw)
end
return reply('found', redis.call('PTTL', record) .. ' ' .. raw)
