-- begin: requests the right to run.
--
-- Every delivery generates a new execution id; the task id cannot be used, since a redelivered message has
-- the same one. A begin that the client library resends finds its own record and gets the same reply. A
-- message that was put back because its begins got no reply carries their execution ids as
-- `unanswered_ids`: if one of them was granted, nothing runs under it, and this delivery continues it
-- without counting an attempt. Steps that earlier executions finished stay in the body. A takeover stores
-- how many milliseconds the key was orphaned in the format field, which a STARTED record does not need.
--
-- The messages of one root are numbered: each retry has a higher generation than the message before it.
-- A copy of a message that ended in an error gets that error, even if another message holds the key now.
-- A copy of a message older than the retry for which the key is reserved does not count as that retry. The
-- outcome of a task that replaced itself names the first generation of its root that continues under the
-- key.
--
-- A message whose outcome is stored sends its continuation if the delivery that was to send it has not
-- marked it as sent within its lease.
--
-- If the key may run again, an execution also needs the turn, which one message at a time holds. A message
-- that has begun before, or waits for the next turn, comes back for it; while it waits, it renews its
-- reservation.
--
-- KEYS
--   record             the key's record; if the key may run again, the message's
--   entry              the message's
--   turn               the key's record, if the key may run again
-- ARGV
--   execution_id       id of this execution
--   unanswered_ids     execution ids of earlier deliveries of this message that got no reply, or ''
--   task_id            id of the task
--   root               of the message
--   generation         of the message, among those of its root
--   fingerprint        of all arguments, then the label; or ''
--   worker             the process that runs the task
--   lease_ms           right to run without a heartbeat
--   ttl_ms             lease_ms plus the time for which a dead execution is remembered
--   max_attempts       executions that may die in a row
--   error_ms           retention of the FAILED record after the last of them
--   continues          1: something follows the task
--   next_turn_ms       with a turn: how long the next one is reserved for this message if another run is
--                      active; 0: it does not wait
--   min_retention_ms   if given, how long to keep the outcome of an execution that this call finds running
-- REPLIES
--   begun              run; attempt > 1: this execution takes over from one that died
--   held               another execution runs, or the key is reserved for another message, or another
--                      delivery of this message sends the continuation; its record or entry
--   busy               another message has the turn; the record of the turn
--   later              the same, and this message has begun before or waits for the next turn
--   finished           the outcome, or the error that ended this message; send the continuation, if any
--   sent               the same, and the continuation was sent before
--   reused             the record has the fingerprint of other arguments
--   corrupt            not a record that this version can read

local record, entry, turn = unpack(KEYS)
local execution_id, unanswered_ids, task_id, root, generation, fingerprint, worker, lease_ms, ttl_ms, max_attempts, error_ms, continues, next_turn_ms, min_retention_ms =
  unpack(ARGV)

local raw = redis.call('GET', record)
local entry_raw = redis.call('GET', entry)
if not raw and not entry_raw and not turn then
  -- Most begins find no record. They end here, before the prelude: its functions cost more than this does.
  local clock = redis.call('TIME')
  local now_us = clock[1] * 1000000 + clock[2]
  raw = struct.pack(LAYOUT, 'S', 1, now_us, now_us / 1000 + lease_ms, #fingerprint, fingerprint, #task_id,
    task_id, #worker, worker, #root + #execution_id, root .. execution_id, 0, '')
  redis.call('SET', record, raw, 'PX', ttl_ms)
  return 'begun ' .. clock[1] .. ' ' .. clock[2] .. ' ' .. raw
end

-- PRELUDE

local state, stored_attempt, stored_token, at, stored_fingerprint, stored_task_id, stored_worker, owner, stored_format, position =
  unpack_record(raw)
if raw and not state then
  return reply('corrupt', raw)
elseif state and is_finished(state) and continues == '0' and not entry_raw and not turn
    and not string.match(stored_format, '^=') then
  -- Most replays. They end here, before the functions below.
  local differs = differ(stored_fingerprint, fingerprint)
  return reply(differs and 'reused' or 'finished', raw)
end

-- Whether another delivery is sending the continuation.
local function is_sent_by_another(owner, now)
  local id = execution_of(owner)
  return deadline_of(owner) > now and id ~= execution_id and not string.find(unanswered_ids, id, 1, true)
end

-- Replies with the outcome of this message. If its continuation is not sent yet, this delivery sends it.
local function answer(key, raw)
  local state, attempt, token, at, fingerprint, task_id, _, owner, format, position = unpack_record(raw)
  if not is_sending(state) then
    return reply('sent', raw)
  end
  local now = read_clock()
  if is_sent_by_another(owner, now) then
    return reply('held', raw)
  end
  raw = pack(state, attempt, token, at, fingerprint, task_id, worker,
    with_deadline(root .. execution_id, now + lease_ms), format, string.sub(raw, position))
  redis.call('SET', key, raw, 'KEEPTTL')
  return reply('finished', raw)
end

-- Replies with the outcome of another message to one that has a continuation of its own.
local function answer_duplicate(raw, entry_state, entry_owner)
  local now = read_clock()
  if entry_state == 'C' then
    return reply('sent', raw)
  elseif entry_state == 'P' and is_sent_by_another(entry_owner, now) then
    return reply('held', entry_raw)
  end
  local owner = with_deadline(root .. execution_id, now + lease_ms)
  redis.call('SET', entry, pack('P', 0, generation, now, '', task_id, worker, owner, '', ''), 'PX',
    math.max(redis.call('PTTL', record), lease_ms))
  return reply('finished', raw)
end

generation = tonumber(generation)
local entry_state, entry_owner
if entry_raw then
  local ended_generation, _
  entry_state, _, ended_generation, _, _, _, _, entry_owner = unpack_record(entry_raw)
  if not entry_state then
    return reply('corrupt', entry_raw)
  elseif string.find('FQ', entry_state) and generation <= ended_generation
      or turn and string.find('CP', entry_state) then
    return answer(entry, entry_raw)
  end
end

local is_awaited, is_replacement
if raw then
  local is_its = root_of(owner) == root
  local first_generation, steps = read_replacement(raw, stored_format, position)
  if first_generation and first_generation <= generation and stored_task_id == task_id then
    is_replacement, stored_attempt, position = true, 0, steps
  end
  if turn and is_finished(state) and not is_its and owner ~= '' and not string.match(stored_format, '^=') then
    -- The task id is published again. Copies of the earlier message find its outcome in their entry.
    local former = string.sub(entry, 1, -2 * ID - 1) .. string.gsub(root_of(owner), '.', function(byte)
      return string.format('%02x', string.byte(byte))
    end)
    redis.call('SET', former, raw, 'PX', math.max(redis.call('PTTL', record), 1))
    raw, stored_token = nil, nil
  elseif differ(stored_fingerprint, fingerprint)
      and not (state == 'R' and position > #raw and at <= read_clock()) then
    return reply('reused', raw)
  elseif is_finished(state) and not is_replacement then
    if continues == '0' or turn and not is_its then
      return reply('finished', raw)
    elseif is_its then
      return answer(record, raw)
    end
    return answer_duplicate(raw, entry_state, entry_owner)
  elseif state == 'R' and owner == '' then
    is_awaited = stored_task_id == task_id
  elseif state == 'R' and is_its then
    is_awaited = tonumber(string.sub(owner, ID + 1)) <= generation
  end
end

local now, now_us = read_clock()
local attempt, token, orphaned_ms, body = 1, now_us, '', ''
local turn_raw = turn and redis.call('GET', turn)
local last_token, waiting
if turn_raw then
  local turn_state, _, turn_token, turn_at, _, turn_task_id, _, turn_owner, turn_format, turn_position =
    unpack_record(turn_raw)
  if not turn_state then
    return reply('corrupt', turn_raw)
  elseif not is_finished(turn_state) then
    local entry, _, waiting_task_id = read_waiting(turn_raw, turn_position, now)
    if turn_at > now and turn_token ~= stored_token and not (turn_state == 'R' and turn_task_id == task_id) then
      local waits = waiting_task_id == task_id
      if turn_state == 'S' and next_turn_ms ~= '0' and (waits or not entry) then
        waits = true
        redis.call('SET', turn, string.sub(turn_raw, 1, turn_position - 1)
          .. pack_waiting(now + next_turn_ms, task_id, fingerprint), 'KEEPTTL')
      end
      local returns = raw or waits
      return reply(returns and 'later' or 'busy', turn_raw)
    elseif waiting_task_id ~= task_id then
      waiting = entry
    end
  elseif not raw and turn_task_id == task_id and not string.match(turn_format, '^=')
      and (turn_owner == '' or root_of(turn_owner) == root) then
    -- The message ended before the key was made to run again.
    return reply('finished', turn_raw)
  end
  last_token = turn_token
  token = math.max(token, turn_token + 1)
end
if raw then
  local stored_id = state == 'S' and execution_of(owner) or ''
  if stored_id == execution_id and (not turn or last_token == stored_token) then
    attempt, token, orphaned_ms = stored_attempt, stored_token, stored_format
  else
    local unanswered = stored_id ~= '' and string.find(unanswered_ids, stored_id, 1, true)
    if at > now and not unanswered and not is_replacement and not is_awaited then
      -- Not each time, since each change of the record wakes all calls that wait for it.
      if state == 'S' and min_retention_ms and kept_ms(stored_format, 0, now) < min_retention_ms / 2 then
        raw = pack(state, stored_attempt, stored_token, at, stored_fingerprint, stored_task_id, stored_worker, owner,
          (string.gsub(stored_format, ',%d+$', '')) .. string.format(',%.0f', now + min_retention_ms), string.sub(raw, position))
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
    else
      orphaned_ms = read_met(stored_format)
    end
    if attempt > stored_attempt and attempt > tonumber(max_attempts) then
      local letter, new_owner = sending('F', root .. execution_id, now, continues == '0' and '' or lease_ms)
      raw = pack(letter, stored_attempt, token, now, stored_fingerprint, task_id, stored_worker,
        (turn or continues ~= '0') and new_owner or '', '', 'poisoned')
      redis.call('SET', record, raw, 'PX', kept_ms(stored_format, error_ms, now))
      return reply('finished', raw)
    end
  end
  fingerprint = fingerprint == '' and stored_fingerprint or fingerprint
  body = string.sub(raw, position)
end

local started = pack('S', attempt, token, now + lease_ms, fingerprint, task_id, worker, root .. execution_id,
  orphaned_ms, body)
redis.call('SET', record, started, 'PX', ttl_ms)
if turn then
  redis.call('SET', turn, string.sub(started, 1, #started - #body) .. (waiting or ''), 'PX', ttl_ms)
end
return reply('begun', started)
