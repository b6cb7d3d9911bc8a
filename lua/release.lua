-- release: gives the key back after an error that may be retried.
--
-- With a hold the key stays reserved for a retry of the same task id, so that the retry meets no conflict
-- and neither a duplicate nor a copy of an earlier message begins before it. Attempts count deaths in a
-- row: a release resets them. Finished steps are kept: if there are any, the record stays, reserved for no
-- message. If there is no record, the reply is `ok`, since the key is free.
--
-- An error that is final for its task id, but not for the key, stays in the record: copies of its message
-- get it from begin instead of an execution.
--
-- The outcome of a task that replaced itself is released with the error of its replacement, which has sent
-- the continuation. With a turn, no other message meets that outcome.
--
-- KEYS
--   record             the key's record; if the key may run again, the message's
--   turn               the key's record, if the key may run again
-- ARGV
--   token              of the execution
--   hold_ms            how long the key stays reserved for its task id; 0: not at all
--   retention_ms       how long finished steps are kept
--   generation         of the retry for which the key is held; else of the message that ended
--   format             encoding of the error
--   error              the error, or the reason why it is not stored; '' if it is not final
--   error_ms           how long the error is kept
-- REPLIES
--   ok                 the execution does not hold the key any more
--   lost               another execution holds it, or it has an outcome; the current record

local record, turn = unpack(KEYS)
local token, hold_ms, retention_ms, generation, format, error, error_ms = unpack(ARGV)

local now = read_clock()
local raw = redis.call('GET', record)
local turn_raw = turn and redis.call('GET', turn)
local has_turn = is_held_by(turn_raw, token)
if not raw then
  if has_turn then
    end_turn(turn, turn_raw, now)
  end
  return reply('ok')
end
local state, _, stored_token, _, fingerprint, task_id, _, _, stored_format, position = unpack_record(raw)
local letter, steps
if error ~= '' and not turn and state and is_finished(state) then
  letter, _, steps = 'G', read_replacement(raw, stored_format, position)
  state, position = steps and 'S' or state, steps or position
end
if state ~= 'S' or stored_token ~= tonumber(token) then
  local resent = (state == 'R' or state == 'E') and stored_token == tonumber(token)
  return reply(resent and 'ok' or 'lost', raw)
elseif turn and not has_turn then
  return reply('lost', turn_raw and raw)
end
local body = string.sub(raw, position)
if error ~= '' then
  body = prepend_error(raw, position, task_id, generation, now, format, error, letter)
end
local new_state, owner, met, ttl_ms = 'R', NOBODY, '', hold_ms + retention_ms
if tonumber(hold_ms) ~= 0 then
  owner, met = generation, read_met(stored_format)
  ttl_ms = body == '' and not turn and hold_ms or ttl_ms
elseif body == '' then
  redis.call('DEL', record)
  if turn then
    end_turn(turn, turn_raw, now)
  end
  return reply('ok')
elseif has_no_steps(body, 1) then
  new_state, fingerprint = 'E', ''
end
if error ~= '' then
  error_ms = kept_ms(stored_format, error_ms, now)
  ttl_ms = new_state == 'E' and error_ms or math.max(error_ms, ttl_ms)
end
local released =
  pack(new_state, 0, stored_token, now + hold_ms, fingerprint, task_id, '', owner, met, body)
redis.call('SET', record, released, 'PX', ttl_ms)
if turn and tonumber(hold_ms) ~= 0 then
  local _, _, _, _, _, _, _, _, _, turn_position = unpack_record(turn_raw)
  local waiting, till = read_waiting(turn_raw, turn_position, now)
  redis.call('SET', turn, string.sub(released, 1, #released - #body) .. (waiting or ''), 'PX',
    math.max(hold_ms, (till or now) - now))
elseif turn then
  end_turn(turn, turn_raw, now)
end
return reply('ok')
