-- reserve_turn: reserves the turn of a key that may run again, for a task that is about to be published.
--
-- While it is reserved for a message that has not begun, that message is enough: its run will begin after
-- this publish. While an execution runs, the next turn can be reserved for one message that waits.
--
-- KEYS
--   turn               the key's record
-- ARGV
--   task_id            of the task to publish
--   fingerprint        of all arguments, then the label; or ''
--   hold_ms            how long the reservation lasts if no execution begins; 0 gives it back
--   waits              1: while an execution runs, reserve the next turn
-- REPLIES
--   reserved           publish the task
--   held               the turn, or the next one, is reserved for another task id, or an execution runs; its
--                      record
--   reused             the same, for other arguments
--   expired            an execution died; publish without a reservation: the next begin takes over
--   corrupt            not a record that this version can read

local turn = KEYS[1]
local task_id, fingerprint, hold_ms, waits = unpack(ARGV)

local now, now_us = read_clock()
local token = now_us
local turn_raw = redis.call('GET', turn)
local state, _, stored_token, at, stored_fingerprint, stored_task_id, _, owner, _, position =
  unpack_record(turn_raw)
if turn_raw and not state then
  return reply('corrupt', turn_raw)
elseif state then
  token = math.max(token, stored_token + 1)
end
local waiting, till, waiting_task_id, waiting_fingerprint
if state and not is_finished(state) then
  waiting, till, waiting_task_id, waiting_fingerprint = read_waiting(turn_raw, position, now)
end
if tonumber(hold_ms) == 0 then
  if waiting_task_id == task_id then
    redis.call('SET', turn, string.sub(turn_raw, 1, position - 1), 'KEEPTTL')
  elseif state == 'R' and stored_task_id == task_id then
    end_turn(turn, turn_raw, now)
  end
  return reply('reserved')
end
if waiting and waiting_task_id ~= task_id then
  local differs = differ(waiting_fingerprint, fingerprint)
  return reply(differs and 'reused' or 'held',
    pack('R', 0, stored_token, till, waiting_fingerprint, waiting_task_id, '', '', '', ''))
elseif state == 'S' and waits == '1' and stored_task_id ~= task_id or owner == NOBODY and at > now then
  redis.call('SET', turn, string.sub(turn_raw, 1, position - 1)
    .. pack_waiting(now + hold_ms, task_id, fingerprint), 'KEEPTTL')
  return reply('reserved')
elseif (state == 'S' or state == 'R' and stored_task_id ~= task_id) and at > now then
  local differs = differ(stored_fingerprint, fingerprint)
  return reply(differs and 'reused' or 'held', turn_raw)
elseif state == 'S' then
  return reply('expired', turn_raw)
end
redis.call('SET', turn, pack('R', 0, token, now + hold_ms, fingerprint, task_id, '', '', '', ''), 'PX', hold_ms)
return reply('reserved')
