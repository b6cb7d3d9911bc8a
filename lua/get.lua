-- get: reads the record, and says how long it is kept.
--
-- KEYS
--   record             the key's record
-- ARGV
-- REPLIES
--   there              the milliseconds that it has left (-1: for ever), a space, and the record
--   absent             there is none, or errors of ended task ids alone, in this record

local record = KEYS[1]

ask_time()
local raw = redis.call('GET', record)
if not raw or string.sub(raw, 1, 1) == 'E' then
  return reply('absent', raw)
end
return reply('there', redis.call('PTTL', record) .. ' ' .. raw)
