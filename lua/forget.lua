-- forget: an operator's word; the key is absent afterwards, whatever was there.
--
-- KEYS
--   record             the key's record
-- ARGV
--   state              forget only what was shown: R, S, C or F; ? for a record that cannot be read;
--                      '' for any
--   token              of the record that was shown, or ''
-- REPLIES
--   ok                 forgotten
--   absent             there was nothing, or errors of ended task ids alone
--   changed            by now it is not what was shown

local record = KEYS[1]
local state, token = unpack(ARGV)

-- Another kind of value is no record, and may be forgotten as one that cannot be read.
local raw = (token == '' and redis.pcall or redis.call)('GET', record)
local there, _, last_token = unpack_record(raw)
if state ~= '' and raw then
  if there == 'E' then
    return reply('absent')
  end
  local shown = there == 'D' and 'C' or there == 'G' and 'F' or there or '?'
  if shown ~= state or last_token ~= tonumber(token) then
    return reply('changed', raw)
  end
end
if redis.call('DEL', record) == 0 or there == 'E' then
  return reply('absent')
end
return reply('ok')
