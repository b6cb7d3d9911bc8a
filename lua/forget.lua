-- forget: an operator's word; the key is absent afterwards, whatever was there.
--
-- KEYS
--   record             the key's record
-- ARGV
--   token              forget only this token's record; '' for any, damaged ones too
-- REPLIES
--   ok                 forgotten
--   absent             there was nothing
--   changed            another token's record is there by now

local record = KEYS[1]
local token = ARGV[1]

if token ~= '' then
  local raw = redis.call('GET', record)
  local _, _, last_token = unpack_record(raw or '')
  if raw and last_token ~= tonumber(token) then
    return reply('changed', raw)
  end
end
return reply(redis.call('DEL', record) == 1 and 'ok' or 'absent')
