-- reserve: reserves the key for a task that is about to be published.
--
-- KEYS
--   record             the key's record
-- ARGV
--   task_id            of the task to publish
--   fingerprint        of all arguments, then the label; or ''
--   hold_ms            how long the reservation lasts if no execution begins; 0 gives it back
-- REPLIES
--   reserved           publish the task
--   held               the key is reserved for another task id, or an execution runs
--   expired            an execution died; publish without a reservation: the next begin takes over
--   finished           the outcome
--   reused             the record has the fingerprint of other arguments
--   corrupt            not a record that this version can read

local record = KEYS[1]
local task_id, fingerprint, hold_ms = unpack(ARGV)

local now, now_us = read_clock()
local attempt, token, body, ttl_ms = 0, now_us, '', hold_ms
local raw = redis.call('GET', record)
if raw then
  local state, stored_attempt, stored_token, at, stored_fingerprint, stored_task_id, _, owner, _, position =
    unpack_record(raw)
  if not state then
    return reply('corrupt', raw)
  elseif differ(stored_fingerprint, fingerprint)
      and not (state == 'R' and position > #raw and at <= now) then
    return reply('reused', raw)
  elseif is_finished(state) then
    return reply('finished', raw)
  elseif at > now and (stored_task_id ~= task_id or owner == NOBODY or state == 'S') then
    return reply('held', raw)
  elseif state == 'S' then
    return reply('expired', raw)
  end
  attempt, token = stored_attempt, math.max(token, stored_token + 1)
  fingerprint = fingerprint == '' and stored_fingerprint or fingerprint
  body = string.sub(raw, position)
  if body ~= '' or attempt > 0 then
    ttl_ms = math.max(hold_ms, redis.call('PTTL', record))
  end
end
if tonumber(ttl_ms) == 0 then
  redis.call('DEL', record)
  return reply('reserved')
end
-- A reservation is for any message of the task id. One that is given back is for no message.
local new_owner = ''
if tonumber(hold_ms) == 0 then
  new_owner = NOBODY
  if body == '' then
    fingerprint = ''
  end
end
local reserved =
  pack('R', attempt, token, now + hold_ms, fingerprint, task_id, '', new_owner, '', body)
redis.call('SET', record, reserved, 'PX', ttl_ms)
return reply('reserved', reserved)
