-- forget: deletes the record, whatever its state.
--
-- Entries stay: copies of a message that has ended in an error still get the error.
--
-- KEYS
--   record             the record of the key, or of one message
-- ARGV
--   state              delete only the record that was displayed: R, S, C or F; ? for one that cannot
--                      be read; - for none; '' for any
--   token              of the displayed record, or ''
-- REPLIES
--   ok                 deleted; the record, if it can be read
--   absent             there was no record, or only the attempts of one
--   changed            the record has changed since it was displayed; the current record

local record = KEYS[1]
local state, token = unpack(ARGV)

-- A value of another type can be deleted like a record that cannot be read. `raw` is an error then.
local raw = redis.pcall('GET', record)
local stored_state, _, stored_token, _, _, _, _, owner, _, position = unpack_record(raw)
local is_absent = is_remnant(owner, raw, position)
if state ~= '' and raw then
  if is_absent then
    return reply('absent')
  end
  local displayed = stored_state == 'P' and 'C' or stored_state == 'Q' and 'F' or stored_state or '?'
  if displayed ~= state or stored_token ~= tonumber(token) then
    return type(raw) == 'table' and raw or reply('changed', raw)
  end
end
if redis.call('DEL', record) == 0 or is_absent then
  return reply('absent')
end
return reply('ok', stored_state and raw)
