-- abandon: ends the lease of a dead execution, so that the next begin takes over.
--
-- The parent process has seen its child die, or is about to kill it. The token was in the child's memory,
-- so task id and worker identify the execution; if the child has begun another one since, that one is left
-- alone. The record gets a token that no execution has: a child that lives a moment longer can neither
-- extend the lease nor complete.
--
-- If the message does not return to the broker, the death is final for its task id: copies of the message
-- get the error, as after `release`. It still counts as a death.
--
-- KEYS
--   record             the key's record; if the key may run again, the message's
--   turn               the key's record, if the key may run again
-- ARGV
--   task_id            of the task that the child ran
--   worker             the child
--   grace_ms           how long the child may still live; 0 if it is dead
--   generation         of the message
--   format             encoding of the error; if the message returns, how the execution ends
--   error              the error, or the reason why it is not stored; '' if the message returns
--   error_ms           how long the error is kept
-- REPLIES
--   ok                 the lease has ended
--   lost               that child does not hold the record; the current record

local record, turn = unpack(KEYS)
local task_id, worker, grace_ms, generation, format, error, error_ms = unpack(ARGV)

local now = read_clock()
local raw = redis.call('GET', record)
local state, attempt, token, at, fingerprint, stored_task_id, stored_worker, _, stored_format, position =
  unpack_record(raw or '')
if not state or is_finished(state) or stored_task_id ~= task_id or stored_worker ~= worker then
  return reply('lost', raw)
elseif state ~= 'S' then
  -- A worker in a record that is not STARTED means that this call was made before.
  return reply('ok')
end
local new_state, body = 'S', string.sub(raw, position)
if error ~= '' then
  new_state, body = 'R', prepend_error(raw, position, task_id, generation, now, format, error)
  if has_no_steps(body, 1) then
    new_state, fingerprint = 'E', ''
  end
end
local abandoned = pack(new_state, attempt, token + 1, math.min(at, now + grace_ms), fingerprint, stored_task_id,
  stored_worker, new_state == 'S' and '' or NOBODY, new_state == 'S' and format .. read_met(stored_format) or '', body)
redis.call('SET', record, abandoned, 'KEEPTTL')
if new_state == 'E' then
  redis.call('PEXPIRE', record, kept_ms(stored_format, error_ms, now))
end
local turn_raw = turn and redis.call('GET', turn)
if is_held_by(turn_raw, token) then
  -- Nobody begins before the child is dead.
  local _, _, _, _, _, _, _, _, _, turn_position = unpack_record(turn_raw)
  local waiting = read_waiting(turn_raw, turn_position, now) or ''
  redis.call('SET', turn, string.sub(abandoned, 1, #abandoned - #body) .. waiting, 'KEEPTTL')
end
return reply('ok')
