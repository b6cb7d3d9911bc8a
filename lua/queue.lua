-- queue: reserves the key for a message that is about to be published, or gives a reservation back.
--
-- The slot names the one message of the key that was published and has not begun. One is enough: its run
-- will begin after this publish, and have all effects of it. Newer arguments can replace those of that
-- message. They are stored as the body of its own record, where they outlive the slot, and where its begin
-- and a takeover find them.
--
-- KEYS
--   slot               of the key
--   record             of the key or, if the key may run again, of the message
--   turn               of the key, if a running call makes another message needless ("finished")
-- ARGV
--   task_id            of the message
--   deadline_ms        server time after which this copy does nothing
--   hold_ms            how long the slot is kept if no execution begins; 0 gives it back
--   fingerprint        of all arguments, or ''
--   tail               label; copied unread
--   arguments          an entry that replaces those of the message that waits; '=': too large, so this message
--                      takes its place and answers for it; '' none
--   keep_ms            how long the arguments are kept
--   quiet_ms           the waiting message begins when no publish came for so long
--   max_wait_ms        or after this time
-- REPLIES
--   reserved           publish the message; or given back
--   held               another message waits, or an execution runs; its slot or record
--   finished           the outcome, or what is not a record of this layout
--   late               the deadline has passed

local LAYOUT = '>c1BI7I6Bc0I2c0Bc0Bc0Bc0'
local slot, record, turn = unpack(KEYS)
local task_id, deadline_ms, hold_ms, fingerprint, tail, arguments, keep_ms, quiet_ms, max_wait_ms = unpack(ARGV)
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local function reply(case, raw) return case .. ' ' .. clock[1] .. ' ' .. clock[2] .. ' ' .. (raw or '') end
-- In a slot, the field of the token has the time in milliseconds until which quiet times can postpone the
-- begin, `at` the end of the current quiet time, and the body the name of the message's record.
local function pack(letter, until_ms, at, fp, id, owner, tail, body)
  return struct.pack(LAYOUT, letter, 0, until_ms, at, #fp, fp, #id, id, 0, '', #owner, owner, #tail, tail) .. body
end
local function is_live(raw) return raw and string.find(raw, '^[WBAba]') and struct.unpack('>I6', raw, 10) > now end

local waiting = redis.call('GET', slot)
local _, until_ms, fp, id, stored_tail, position
if waiting then
  _, _, until_ms, _, fp, id, _, _, stored_tail, position = struct.unpack(LAYOUT, waiting)
end
if hold_ms == '0' then
  if id == task_id then
    redis.call('DEL', slot)
  end
  return reply('reserved')
elseif now > tonumber(deadline_ms) then
  return reply('late')
end
local raw = redis.call('GET', record)
if raw and not string.find(raw, '^[WBAba%c]') then
  return reply('finished', raw)
elseif is_live(raw) then
  return reply('held', raw)
end
local pointer = turn and redis.call('GET', turn)
local holder = pointer and string.find(pointer, '^%c') and redis.call('GET', string.sub(pointer, 8))
if is_live(holder) then
  return reply('held', holder)
elseif waiting and id ~= task_id then
  local name = string.sub(waiting, position)
  local known = redis.call('GET', name)
  if not known or string.find(known, '^W') and not is_live(known) then  -- it has not begun
    local ready = math.min(now + quiet_ms, until_ms)
    if arguments == '=' then
      redis.call('SET', name, pack('D', 0, now, '', id, '9999999999999999', '', task_id), 'PX', keep_ms)
      redis.call('SET', slot, pack('W', until_ms, ready, fingerprint, task_id, '0', tail, record), 'PX', hold_ms)
      return reply('reserved')
    elseif arguments ~= '' then
      redis.call('SET', name, pack('W', 0, 0, '', id, '0', '', arguments), 'PX', keep_ms)
    end
    if quiet_ms ~= '0' then
      waiting = pack('W', until_ms, ready, fp, id, '0', stored_tail, name)
      redis.call('SET', slot, waiting, 'KEEPTTL')
    end
    return reply('held', waiting)
  end
end
redis.call('SET', slot, pack('W', now + max_wait_ms, now + quiet_ms, fingerprint, task_id, '0', tail, record), 'PX', hold_ms)
return reply('reserved')
