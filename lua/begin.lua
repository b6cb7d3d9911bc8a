-- begin: asks for the right to run.
--
-- The execution id is drawn afresh for each pass through the gate, never the task id: a redelivered
-- message bears the same task id. A begin that the client sends twice finds its own record and gets
-- the same answer. A message put back because an answer was lost carries the ids of those passes as
-- `prior`: if one did begin, nobody runs under it, and this pass steps in without counting an attempt.
-- The steps that an earlier execution has finished stay in the body. A takeover writes down, where an
-- outcome has its format, for how many milliseconds the key had stood still.
--
-- KEYS
--   record             the key's record
-- ARGV
--   owner              id of this execution
--   prior              ids of earlier passes of the same message that had no answer, or ''
--   task_id            id of the task
--   fingerprint        of all arguments, or ''
--   worker             who runs it
--   lease_ms           right to run without a heartbeat
--   keep_ms            lease_ms, and then how long an execution that died is remembered
--   max_attempts       executions that may die in a row
--   error_ms           retention of the FAILED record of a task that has used them up
-- REPLIES
--   begun              run; attempt > 1 says that this takes over from one that died
--   held               another execution runs, or another task id has it reserved
--   finished           here is the outcome
--   reused             other arguments came with this key
--   corrupt            not a record that this version can read

local record = KEYS[1]
local owner, prior, task_id, fingerprint, worker, lease_ms, keep_ms, max_attempts, error_ms =
  unpack(ARGV)

local raw = redis.call('GET', record)
local state, attempts, last_token, at, known, holder, last_worker, last_owner, stood, position
if raw then
  state, attempts, last_token, at, known, holder, last_worker, last_owner, stood, position =
    unpack_record(raw)
  if not state then
    return reply('corrupt', raw)
  elseif differ(known, fingerprint) then
    return reply('reused', raw)
  elseif finished(state) then
    return reply('finished', raw)
  end
end

local now, now_us = ask_time()
local attempt, token, idle, steps = 1, now_us, '', ''
if raw then
  if state == 'R' then
    if holder ~= task_id and at > now then
      return reply('held', raw)
    end
    token = math.max(token, last_token + 1)
  elseif last_owner == owner then
    attempt, token, idle = attempts, last_token, stood
  else
    local unanswered = last_owner ~= '' and string.find(prior, last_owner, 1, true)
    if at > now and not unanswered then
      return reply('held', raw)
    end
    attempt = unanswered and attempts or attempts + 1
    idle = unanswered and stood or string.format('%.0f', now - at)
    token = math.max(token, last_token + 1)
    if attempt > attempts and attempt > tonumber(max_attempts) then
      raw = pack('F', attempts, token, now, known, task_id, last_worker, '', '', 'poisoned')
      redis.call('SET', record, raw, 'PX', error_ms)
      return reply('finished', raw)
    end
  end
  fingerprint = fingerprint == '' and known or fingerprint
  steps = string.sub(raw, position)
end

local started =
  pack('S', attempt, token, now + lease_ms, fingerprint, task_id, worker, owner, idle, steps)
redis.call('SET', record, started, 'PX', keep_ms)
return reply('begun', started)
