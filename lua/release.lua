-- release: gives the key back after an error that may be retried.
--
-- With a hold the key stays reserved for a retry of the same message, so that the retry meets no conflict
-- and neither a duplicate nor a copy of an earlier message begins before it. Attempts count deaths in a
-- row: a release resets them. Finished steps are kept: if there are any, the record stays, reserved for no
-- message. If there is no record, the reply is `ok`, since the key is free.
--
-- An error that ends the message, but not the key, becomes the message's entry: its copies get it from
-- begin instead of an execution.
--
-- The outcome of a task that replaced itself is released with the error of its replacement, which has sent
-- the continuation. With a turn, no other message reads that outcome.
--
-- KEYS
--   record             the key's record; if the key may run again, the message's
--   entry              the message's
--   turn               the key's record, if the key may run again
-- ARGV
--   token              of the execution
--   hold_ms            how long the key stays reserved for its retry; 0: not at all
--   retention_ms       how long finished steps are kept
--   generation         of the retry for which the key is held; else of the message that ended
--   format             encoding of the error
--   error              the error, or the reason why it is not stored; '' if it is not final
--   error_ms           how long the error is kept
--   lease_ms           how long sending the errbacks may take; '': there are none
-- REPLIES
--   ok                 the execution does not hold the key any more
--   lost               another execution holds it, or it has an outcome; the current record

local record, entry, turn = unpack(KEYS)
local token, hold_ms, retention_ms, generation, format, error, error_ms, lease_ms = unpack(ARGV)

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
local state, _, stored_token, _, fingerprint, task_id, worker, owner, stored_format, position = unpack_record(raw)
if error ~= '' and not turn and state == 'C' then
  local _, steps = read_replacement(raw, stored_format, position)
  if steps then
    state, position = 'S', steps
  end
end
if state ~= 'S' or stored_token ~= tonumber(token) then
  local resent = state == 'R' and stored_token == tonumber(token)
  return reply(resent and 'ok' or 'lost', raw)
elseif turn and not has_turn then
  return reply('lost', turn_raw and raw)
end
if error ~= '' then
  leave_error(entry, now, owner, task_id, worker, generation, format, error,
    kept_ms(stored_format, error_ms, now), lease_ms)
end
local body = string.sub(raw, position)
local new_owner, met, ttl_ms = NOBODY, '', hold_ms + retention_ms
if tonumber(hold_ms) ~= 0 then
  new_owner, met = root_of(owner) .. generation, read_met(stored_format)
  ttl_ms = body == '' and not turn and hold_ms or ttl_ms
elseif body == '' then
  redis.call('DEL', record)
  if turn then
    end_turn(turn, turn_raw, now)
  end
  return reply('ok')
end
local released =
  pack('R', 0, stored_token, now + hold_ms, fingerprint, task_id, '', new_owner, met, body)
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
