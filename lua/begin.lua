-- begin: asks for the right to run.
--
-- The execution id is drawn afresh for each pass through the gate, never the task id: a redelivered
-- message bears the same task id. A begin that the client sends twice finds its own record and gets
-- the same answer. A message put back because an answer was lost carries the ids of those passes as
-- `unanswered_ids`: if one did begin, nobody runs under it, and this pass steps in without counting an attempt.
-- The steps that an earlier execution has finished stay in the body. A takeover writes down, where an
-- outcome has its format, for how many milliseconds the key had stood still.
--
-- Messages of one task id are numbered: each retry has a higher generation than the message before it.
-- A copy of a message that ended in an error gets that error, whoever has the key by now. A copy of an
-- earlier message than the retry that the key is reserved for is not that retry. A task that has replaced
-- itself leaves an outcome which says from which generation on a message of its id goes on under the key.
--
-- KEYS
--   record             the key's record
-- ARGV
--   execution_id       id of this execution
--   unanswered_ids     ids of earlier passes of the same message that had no answer, or ''
--   task_id            id of the task
--   generation         of the message, among those of its task id
--   fingerprint        of all arguments, or ''
--   worker             who runs it
--   lease_ms           right to run without a heartbeat
--   ttl_ms             lease_ms, and then how long an execution that died is remembered
--   max_attempts       executions that may die in a row
--   error_ms           retention of the FAILED record of a task that has used them up
-- REPLIES
--   begun              run; attempt > 1 says that this takes over from one that died
--   held               another execution runs, or the key is reserved for another message
--   finished           here is the outcome, or the error that ended this task id
--   reused             other arguments came with this key
--   corrupt            not a record that this version can read

local record = KEYS[1]
local execution_id, unanswered_ids, task_id, generation, fingerprint, worker, lease_ms, ttl_ms, max_attempts, error_ms =
  unpack(ARGV)
generation = tonumber(generation)

local raw = redis.call('GET', record)
local state, attempts, last_token, at, known, holder, last_worker, last_execution_id, stood, position
local awaited, error_from, error_to, goes_on
if raw then
  state, attempts, last_token, at, known, holder, last_worker, last_execution_id, stood, position =
    unpack_record(raw)
  if not state then
    return reply('corrupt', raw)
  elseif not finished(state) then
    if state == 'R' and holder == task_id then
      awaited = last_execution_id == '' and 0 or tonumber(last_execution_id)
    end
    local letter, last_generation, ended_at, format, start
    error_from, error_to, letter, last_generation, ended_at, format, start =
      find_error(raw, position, task_id)
    if error_from and generation <= last_generation and not awaited then
      return reply('finished', pack(letter, attempts, last_token, ended_at, '', task_id, '', '',
        format, string.sub(raw, start, error_to - 1)))
    end
  elseif holder == task_id then
    local from, start = replacement(raw, stood, position)
    if from and from <= generation then
      goes_on, attempts, position = true, 0, start
    end
  end
  if differ(known, fingerprint)
      and not (state == 'R' and no_steps(raw, position) and at <= ask_time()) then
    return reply('reused', raw)
  elseif finished(state) and not goes_on then
    return reply('finished', raw)
  end
end

local now, now_us = ask_time()
local attempt, token, idle, body = 1, now_us, '', ''
if raw then
  if last_execution_id == execution_id then
    attempt, token, idle = attempts, last_token, stood
  else
    local unanswered = state == 'S' and last_execution_id ~= '' and string.find(unanswered_ids, last_execution_id, 1, true)
    if at > now and not unanswered and not goes_on and not (awaited and awaited <= generation) then
      return reply('held', raw)
    end
    token = math.max(token, last_token + 1)
    attempt = unanswered and attempts or attempts + 1
    if unanswered then
      idle = stood
    elseif attempts > 0 then
      idle = string.format('%.0f', math.max(0, now - at))
    end
    if attempt > attempts and attempt > tonumber(max_attempts) then
      raw = pack('F', attempts, token, now, known, task_id, last_worker, '', '', 'poisoned')
      redis.call('SET', record, raw, 'PX', error_ms)
      return reply('finished', raw)
    end
  end
  fingerprint = fingerprint == '' and known or fingerprint
  body = string.sub(raw, position)
  if error_from then
    body = string.sub(raw, position, error_from - 1) .. string.sub(raw, error_to)
  end
end

local started =
  pack('S', attempt, token, now + lease_ms, fingerprint, task_id, worker, execution_id, idle, body)
redis.call('SET', record, started, 'PX', ttl_ms)
return reply('begun', started)
