-- abandon: ends the lease of a dead execution, so that the next begin takes over.
--
-- The parent process has seen its child die, or is about to kill it. The token was in the child's memory,
-- so task id and worker identify the execution; if the child has begun another one since, that one is left
-- alone. The record gets a token that no execution has: a child that lives a moment longer can neither
-- extend the lease nor complete. If the execution has ended and the child died before its continuation was
-- sent, the next delivery sends it.
--
-- If the message does not return to the broker, the death is final: copies of the message get the error,
-- as after `release`. Unlike a release, this does not reset the attempts.
--
-- KEYS
--   record             the key's record; if the key may run again, the message's
--   entry              the message's
--   turn               the key's record, if the key may run again
-- ARGV
--   task_id            of the task that the child ran
--   root               of its message
--   worker             the child
--   grace_ms           how long the child may still live; 0 if it is dead
--   generation         of the message
--   format             encoding of the error; if the message returns, how the execution ends
--   error              the error, or the reason why it is not stored; '' if the message returns
--   error_ms           how long the error is kept
--   execution_id       of the parent, which sends the errbacks
--   lease_ms           how long that may take; '': there are none
-- REPLIES
--   ok                 the lease has ended
--   sending            the execution had ended; its continuation can be sent by another delivery
--   lost               that child does not hold the record; the current record

local record, entry, turn = unpack(KEYS)
local task_id, root, worker, grace_ms, generation, format, error, error_ms, execution_id, lease_ms = unpack(ARGV)

local now = read_clock()

-- Ends the lease of the continuation that the child was sending; returns whether there was one.
local function end_sending(key, raw)
  local state, attempt, token, at, fingerprint, stored_task_id, stored_worker, owner, stored_format, position =
    unpack_record(raw)
  if not state or not is_sending(state) or root_of(owner) ~= root or stored_worker ~= worker then
    return false
  end
  redis.call('SET', key, pack(state, attempt, token, at, fingerprint, stored_task_id, stored_worker,
    with_deadline(owner, math.min(deadline_of(owner), now + grace_ms)), stored_format, string.sub(raw, position)), 'KEEPTTL')
  return true
end

local raw = redis.call('GET', record)
local state, attempt, token, at, fingerprint, stored_task_id, stored_worker, _, stored_format, position =
  unpack_record(raw)
if not state or is_finished(state) or stored_task_id ~= task_id or stored_worker ~= worker then
  if end_sending(record, raw) or end_sending(entry, redis.call('GET', entry)) then
    return reply('sending')
  end
  return reply('lost', raw)
elseif state ~= 'S' then
  -- A worker in a record that is not STARTED means that this call was made before.
  return reply('ok')
end
local body = string.sub(raw, position)
local new_state, owner, ended_by = 'S', '', format .. read_met(stored_format)
if error ~= '' then
  new_state, owner, ended_by = 'R', NOBODY, ''
  error_ms = kept_ms(stored_format, error_ms, now)
  leave_error(entry, now, root .. execution_id, task_id, worker, generation, format, error, error_ms, lease_ms)
  if body == '' then
    fingerprint = ''
  end
end
local abandoned = pack(new_state, attempt, token + 1, math.min(at, now + grace_ms), fingerprint, stored_task_id,
  stored_worker, owner, ended_by, body)
redis.call('SET', record, abandoned, 'KEEPTTL')
if error ~= '' and body == '' then
  redis.call('PEXPIRE', record, error_ms)
end
local turn_raw = turn and redis.call('GET', turn)
if is_held_by(turn_raw, token) then
  -- No execution begins before the child is dead.
  local _, _, _, _, _, _, _, _, _, turn_position = unpack_record(turn_raw)
  local waiting = read_waiting(turn_raw, turn_position, now) or ''
  redis.call('SET', turn, string.sub(abandoned, 1, #abandoned - #body) .. waiting, 'KEEPTTL')
end
return reply('ok')
