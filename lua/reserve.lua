-- reserve: keeps the key for a task that is about to be published.
--
-- KEYS
--   record             the key's record
-- ARGV
--   task_id            of the task to publish
--   fingerprint        of all arguments, or ''
--   hold_ms            how long the reservation lasts if nothing begins; 0 gives it back
-- REPLIES
--   reserved           publish it
--   held               another task id has it reserved, or runs
--   expired            an execution died; publish, unreserved: the next begin takes over
--   finished           here is the outcome
--   reused             other arguments came with this key
--   corrupt            not a record that this version can read

local record = KEYS[1]
local task_id, fingerprint, hold_ms = unpack(ARGV)

local now, now_us = ask_time()
local attempts, token, body, ttl_ms = 0, now_us, '', hold_ms
local raw = redis.call('GET', record)
if raw then
  local state, died, last_token, at, known, holder, _, last_owner, _, position =
    unpack_record(raw)
  if not state then
    return reply('corrupt', raw)
  elseif differ(known, fingerprint)
      and not (state == 'R' and no_steps(raw, position) and at <= now) then
    return reply('reused', raw)
  elseif finished(state) then
    return reply('finished', raw)
  elseif at > now and (holder ~= task_id or last_owner == NOBODY or state == 'S') then
    return reply('held', raw)
  elseif state == 'S' then
    return reply('expired', raw)
  end
  attempts, token = died, math.max(token, last_token + 1)
  fingerprint = fingerprint == '' and known or fingerprint
  body = string.sub(raw, position)
  if body ~= '' then
    ttl_ms = math.max(hold_ms, redis.call('PTTL', record))
  end
end
if tonumber(ttl_ms) == 0 then
  redis.call('DEL', record)
  return reply('reserved')
end
-- Any message of the task id will do. One that is given back is reserved for nobody.
local left, awaited = 'R', ''
if tonumber(hold_ms) == 0 then
  awaited = NOBODY
  if no_steps(body, 1) then
    left, fingerprint = 'E', ''
  end
end
local reserved =
  pack(left, attempts, token, now + hold_ms, fingerprint, task_id, '', awaited, '', body)
redis.call('SET', record, reserved, 'PX', ttl_ms)
return reply('reserved', reserved)
