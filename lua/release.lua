-- release: gives the key back after an error that may be tried again.
--
-- With a hold the key stays reserved for a retry of the same task id, so that it meets no conflict and
-- neither a duplicate nor a copy of an earlier message slips in between. Attempts count deaths in a row:
-- a release is a life sign and sets them back. Steps that are finished stay so: where there are any,
-- the record stays to hold them, reserved for nobody. No record is what a release is for, so `ok` then
-- too.
--
-- An error that is the last word for its task id, though not for the key, stays: copies of its message
-- get it from begin instead of an execution.
--
-- KEYS
--   record             the key's record
-- ARGV
--   token              of the execution
--   hold_ms            how long the key stays reserved for its task id; 0: not at all
--   retention_ms       how long finished steps are kept
--   generation         of the retry that the key is held for; else of the message that ended
--   format             how the error is written
--   error              the error, or the reason why it is not kept; '' where it is not the last word
--   error_ms           how long it is kept
-- REPLIES
--   ok                 the execution no longer holds the key
--   lost               someone else does; here is who

local record = KEYS[1]
local token, hold_ms, retention_ms, generation, format, error, error_ms = unpack(ARGV)

local now = ask_time()
local raw = redis.call('GET', record)
if not raw then
  return reply('ok')
end
local state, _, last_token, _, fingerprint, task_id, _, _, _, position = unpack_record(raw)
if state ~= 'S' or last_token ~= tonumber(token) then
  local resent = (state == 'R' or state == 'E') and last_token == tonumber(token)
  return reply(resent and 'ok' or 'lost', raw)
end
local body = string.sub(raw, position)
if error ~= '' then
  body = with_error(raw, position, task_id, generation, now, format, error)
end
local left, awaited, ttl_ms = 'R', NOBODY, hold_ms + retention_ms
if tonumber(hold_ms) ~= 0 then
  awaited = generation
  ttl_ms = body == '' and hold_ms or ttl_ms
elseif body == '' then
  redis.call('DEL', record)
  return reply('ok')
elseif no_steps(body, 1) then
  left, fingerprint = 'E', ''
end
if error ~= '' then
  ttl_ms = left == 'E' and error_ms or math.max(error_ms, ttl_ms)
end
local released =
  pack(left, 0, last_token, now + hold_ms, fingerprint, task_id, '', awaited, '', body)
redis.call('SET', record, released, 'PX', ttl_ms)
return reply('ok')
