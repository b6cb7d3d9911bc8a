-- release: gives the key back after an error that may be tried again.
--
-- With a hold the key stays reserved for the same task id, so that Celery's own retry meets no
-- conflict and a duplicate does not slip in between. Attempts count deaths in a row: a release is
-- a life sign and sets them back. Steps that are finished stay so: where there are any, the record
-- stays to hold them, reserved for nobody. No record is what a release is for, so `ok` then too.
--
-- KEYS
--   record             the key's record
-- ARGV
--   token              of the execution
--   hold_ms            how long the key stays reserved for its task id; 0: not at all
--   retention_ms       how long finished steps are kept
-- REPLIES
--   ok                 the execution no longer holds the key
--   lost               someone else does; here is who

local record = KEYS[1]
local token, hold_ms, retention_ms = unpack(ARGV)

local now = ask_time()
local raw = redis.call('GET', record)
if not raw then
  return reply('ok')
end
local state, _, last_token, _, fingerprint, task_id, _, _, _, position = unpack_record(raw)
if state ~= 'S' or last_token ~= tonumber(token) then
  local resent = state == 'R' and last_token == tonumber(token)
  return reply(resent and 'ok' or 'lost', raw)
end
local steps = string.sub(raw, position)
if tonumber(hold_ms) == 0 and steps == '' then
  redis.call('DEL', record)
else
  local reserved =
    pack('R', 0, last_token, now + hold_ms, fingerprint, task_id, '', '', '', steps)
  redis.call('SET', record, reserved, 'PX', steps == '' and hold_ms or hold_ms + retention_ms)
end
return reply('ok')
