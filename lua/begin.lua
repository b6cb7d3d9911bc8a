-- begin: requests the right to run.
--
-- Every delivery draws a new execution id; the task id cannot be used, since a redelivered message has
-- the same one. A begin that the client library resends finds its own record and gets the same reply. A
-- message that was put back because a reply was lost carries the execution ids of those deliveries as
-- `unanswered_ids`: if one of them did begin, nothing runs under it, and this delivery continues it
-- without counting an attempt. Steps that earlier executions finished stay in the body. A takeover stores
-- how many milliseconds the key was orphaned in the format field, which a STARTED record does not need.
--
-- Messages of one task id are numbered: each retry has a higher generation than the message before it.
-- A copy of a message that ended in an error gets that error, even if another task id holds the key now.
-- A copy of a message older than the retry for which the key is reserved does not count as that retry. The
-- outcome of a task that replaced itself names the first generation of its task id that continues under
-- the key.
--
-- If the key may run again, an execution also needs the turn, which one message at a time holds. A message
-- that has begun before, or waits for the next turn, comes back for it; while it waits, it renews its
-- reservation.
--
-- KEYS
--   record             the key's record; if the key may run again, the message's
--   turn               the key's record, if the key may run again
-- ARGV
--   execution_id       id of this execution
--   unanswered_ids     execution ids of earlier deliveries of this message that got no reply, or ''
--   task_id            id of the task
--   generation         of the message, among those of its task id
--   fingerprint        of all arguments, then the label; or ''
--   worker             the process that runs the task
--   lease_ms           right to run without a heartbeat
--   ttl_ms             lease_ms plus the time for which a dead execution is remembered
--   max_attempts       executions that may die in a row
--   error_ms           retention of the FAILED record of a task that has used them up
--   wait_ms            with a turn: how long the next one is reserved for a message that meets a run; 0:
--                      no message waits
--   keep_ms            how long the outcome of an execution that this call meets is kept for it, if given
-- REPLIES
--   begun              run; attempt > 1: this execution takes over from one that died
--   held               another execution runs, or the key is reserved for another message; its record
--   busy               another message has the turn; the record of the turn
--   later              the same, and this message has begun before or waits for the next turn
--   finished           the outcome, or the error that ended this task id
--   reused             the record has the fingerprint of other arguments
--   corrupt            not a record that this version can read

local record, turn = unpack(KEYS)
local execution_id, unanswered_ids, task_id, generation, fingerprint, worker, lease_ms, ttl_ms, max_attempts, error_ms, wait_ms, keep_ms =
  unpack(ARGV)

local raw = redis.call('GET', record)
if not raw and not turn then
  -- Most begins find no record. They end here, before the prelude: its functions cost more than this does.
  local clock = redis.call('TIME')
  local now_us = clock[1] * 1000000 + clock[2]
  raw = struct.pack(LAYOUT, 'S', 1, now_us, now_us / 1000 + lease_ms, #fingerprint, fingerprint, #task_id,
    task_id, #worker, worker, #execution_id, execution_id, 0, '')
  redis.call('SET', record, raw, 'PX', ttl_ms)
  return 'begun ' .. clock[1] .. ' ' .. clock[2] .. ' ' .. raw
end

-- PRELUDE

generation = tonumber(generation)
local state, stored_attempt, stored_token, at, stored_fingerprint, stored_task_id, stored_worker
local owner, stored_format, position
local awaited_generation, error_start, error_end, is_replacement
if raw then
  state, stored_attempt, stored_token, at, stored_fingerprint, stored_task_id, stored_worker,
    owner, stored_format, position = unpack_record(raw)
  if not state then
    return reply('corrupt', raw)
  elseif not is_finished(state) then
    if state == 'R' and stored_task_id == task_id then
      awaited_generation = owner == '' and 0 or tonumber(owner)
    end
    local letter, ended_generation, ended_at, format, start
    error_start, error_end, letter, ended_generation, ended_at, format, start =
      find_error(raw, position, task_id)
    if error_start and generation <= ended_generation and not awaited_generation then
      return reply('finished', pack(letter, stored_attempt, stored_token, ended_at, '', task_id, '', '',
        format, string.sub(raw, start, error_end - 1)))
    end
  elseif stored_task_id == task_id then
    local first_generation, steps = read_replacement(raw, stored_format, position)
    if first_generation and first_generation <= generation then
      is_replacement, stored_attempt, position = true, 0, steps
    end
  end
  if differ(stored_fingerprint, fingerprint)
      and not (state == 'R' and has_no_steps(raw, position) and at <= read_clock()) then
    return reply('reused', raw)
  elseif is_finished(state) and not is_replacement then
    return reply('finished', raw)
  end
end

local now, now_us = read_clock()
local attempt, token, orphaned_ms, body = 1, now_us, '', ''
local turn_raw = turn and redis.call('GET', turn)
local last_token, waiting
if turn_raw then
  local turn_state, _, turn_token, turn_at, _, turn_task_id, _, _, turn_format, turn_position =
    unpack_record(turn_raw)
  if not turn_state then
    return reply('corrupt', turn_raw)
  elseif not is_finished(turn_state) then
    local entry, _, waiting_task_id = read_waiting(turn_raw, turn_position, now)
    if turn_at > now and turn_token ~= stored_token and not (turn_state == 'R' and turn_task_id == task_id) then
      local waits = waiting_task_id == task_id
      if turn_state == 'S' and wait_ms ~= '0' and (waits or not entry) then
        waits = true
        redis.call('SET', turn, string.sub(turn_raw, 1, turn_position - 1)
          .. pack_waiting(now + wait_ms, task_id, fingerprint), 'KEEPTTL')
      end
      local returns = raw or waits
      return reply(returns and 'later' or 'busy', turn_raw)
    elseif waiting_task_id ~= task_id then
      waiting = entry
    end
  elseif not raw and turn_task_id == task_id and string.sub(turn_format, 1, 1) ~= '=' then
    -- The message ended before the key was made to run again.
    return reply('finished', turn_raw)
  end
  last_token = turn_token
  token = math.max(token, turn_token + 1)
end
if raw then
  if owner == execution_id and (not turn or last_token == stored_token) then
    attempt, token, orphaned_ms = stored_attempt, stored_token, stored_format
  else
    local unanswered = state == 'S' and owner ~= '' and string.find(unanswered_ids, owner, 1, true)
    if at > now and not unanswered and not is_replacement
        and not (awaited_generation and awaited_generation <= generation) then
      -- Not each time: who waits for a change of the record would wake all others.
      if state == 'S' and keep_ms and kept_ms(stored_format, 0, now) < keep_ms / 2 then
        raw = pack(state, stored_attempt, stored_token, at, stored_fingerprint, stored_task_id, stored_worker, owner,
          (string.gsub(stored_format, ',%d+$', '')) .. string.format(',%.0f', now + keep_ms), string.sub(raw, position))
        redis.call('SET', record, raw, 'KEEPTTL')
      end
      return reply('held', raw)
    end
    token = math.max(token, stored_token + 1)
    attempt = unanswered and stored_attempt or stored_attempt + 1
    if unanswered then
      orphaned_ms = stored_format
    elseif stored_attempt > 0 then
      orphaned_ms = string.format('%.0f', math.max(0, now - at)) .. read_met(stored_format)
    elseif state == 'R' then
      orphaned_ms = read_met(stored_format)
    end
    if attempt > stored_attempt and attempt > tonumber(max_attempts) then
      raw = pack('F', stored_attempt, token, now, stored_fingerprint, task_id, stored_worker, '', '', 'poisoned')
      redis.call('SET', record, raw, 'PX', kept_ms(stored_format, error_ms, now))
      return reply('finished', raw)
    end
  end
  fingerprint = fingerprint == '' and stored_fingerprint or fingerprint
  body = string.sub(raw, position)
  if error_start then
    body = string.sub(raw, position, error_start - 1) .. string.sub(raw, error_end)
  end
end

local started =
  pack('S', attempt, token, now + lease_ms, fingerprint, task_id, worker, execution_id, orphaned_ms, body)
redis.call('SET', record, started, 'PX', ttl_ms)
if turn then
  redis.call('SET', turn, string.sub(started, 1, #started - #body) .. (waiting or ''), 'PX', ttl_ms)
end
return reply('begun', started)
