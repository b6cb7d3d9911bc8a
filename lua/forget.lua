-- forget: deletes the record of a key, for a person. An execution that runs goes on, and its outcome will be
-- refused.
--
-- Of a key that may run again, only the record that has the key is deleted. Records of messages that have
-- ended stay, for copies of these messages, and so do the newest arguments of one that waits.
--
-- KEYS
--   record             of the key, or of one message
--   slot               of the key; none for the record of one message
-- ARGV
--   deadline_ms        server time after which this copy does nothing
--   token              of the record that was displayed; 0: none was; ?: one that cannot be read; '' any
--   letters            of the state that was displayed
--   force              1: also if an execution runs; else ''
-- REPLIES
--   ok                 deleted; the record, if it can be read
--   absent             there was none
--   changed            the record has changed since it was displayed; the current record
--   running            an execution runs; its record
--   late               the deadline has passed

local LAYOUT = '>c1BI7I6Bc0I2c0Bc0Bc0Bc0'
local record, slot = unpack(KEYS)
local deadline_ms, token, letters, force = unpack(ARGV)
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local function reply(case, raw) return case .. ' ' .. clock[1] .. ' ' .. clock[2] .. ' ' .. (raw or '') end
if now > tonumber(deadline_ms) then
  return reply('late')
end
local raw, holder = redis.pcall('GET', record)  -- a table with an error if the value is not a string
if type(raw) == 'string' and string.find(raw, '^%c') then
  holder = string.sub(raw, 8)
  raw = redis.call('GET', holder)
end
raw = raw or slot and redis.call('GET', slot)
local readable, letter, _, stored, at = pcall(struct.unpack, LAYOUT, raw)
if not readable or not string.find(letter, '[WBAbaDTtVEX]') then
  letter, stored = '', nil
end
if raw and token ~= '' and (tonumber(token) ~= stored or stored and not string.find(letters, letter)) then
  return reply('changed', stored and raw)
elseif force == '' and string.find(letter, '[BAba]') and at > now then
  return reply('running', raw)
elseif holder and string.find(letter, '[WBAba]') then
  redis.call('DEL', holder)
end
return reply(redis.call('DEL', unpack(KEYS)) > 0 and 'ok' or 'absent', stored and raw)
