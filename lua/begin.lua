-- begin: requests the right to run.
--
-- A record is one unit of execution, which alone is renewed and settled. Usually a key has one record. A key
-- that may run again (idempotency_until "finished" or "started") has a record for each message, and a turn:
-- the token and the name of the record that has the key now. A slot names the one message of a key that was
-- published and has not begun; it is in the form of a record. core/record/layout.py describes the bytes.
--
-- The first byte of a record is a letter for its state:
--   B  begun: an execution holds a lease
--   A  alive: the same, and an extension or a step has confirmed that it runs
--   b, a  the same after the end of the lease
--   W  waits: reserved for a retry, or for a message that has not begun
--   V  value: the result is stored
--   T  the same, and one delivery is sending the continuation (t: the next delivery has to send it)
--   E  error: it is stored, for all duplicates
--   D  delegated: the outcome is that of another task, or of a newer message of the same key
--   X  replaced: a newer call, whose task id is the body, has taken the key
--
-- A takeover takes two begins. The first one after the end of a lease only marks it, and the key stays held
-- for a tenth of the lease: an extension that the network or a frozen server has delayed comes before the
-- second. The death of an execution counts as an attempt only if it was confirmed (A), because the reply to
-- a begin may have been lost, and nobody have run. An execution that takes over extends before its body.
--
-- Every copy of a command carries a deadline, and the client sends the next copy after it. So whatever is
-- executed is executed while the client waits. A begin that is sent again gets the same reply, and its lease
-- begins anew.
--
-- KEYS
--   record             of the key or, if the key may run again, of the message
--   slot               of the key, if its messages are deduplicated or it may run again
--   turn               of the key, if it may run again
-- ARGV
--   execution_id       8 random bytes of this delivery
--   task_id            of the message
--   generation         of the message: level of replacement * 10^9 + retries
--   fingerprint        of all arguments, or ''
--   worker             the process that runs the task
--   tail               label; copied unread
--   lease_ms           right to run without a heartbeat
--   ttl_ms             lease_ms plus the time for which a dead execution is remembered
--   hold_ms            how long the slot of this message is kept at least, if it has to wait
--   deadline_ms        server time after which this copy does nothing
--   replaces           1: take the key from a running call; 2: a message that has a slot takes the key from a
--                      dead call and answers for it; 0: neither
-- REPLIES
--   begun              run
--   held               another execution or message has the key; its record or slot
--   wait               the same, and the message comes back under every policy
--   finished           the outcome
--   send               the outcome; this delivery sends the continuation
--   reused             the record has the fingerprint of other arguments
--   late               the deadline has passed
--   corrupt            not a record of this layout

local LAYOUT = '>c1BI7I6Bc0I2c0Bc0Bc0Bc0'
local record, slot, turn = unpack(KEYS)
local execution_id, task_id, generation, fingerprint, worker, tail, lease_ms, ttl_ms, hold_ms, deadline_ms, replaces = unpack(ARGV)
local seconds, microseconds = '0', '0'
local function reply(case, raw) return case .. ' ' .. seconds .. ' ' .. microseconds .. ' ' .. raw end

local raw = redis.call('GET', record)
local readable, letter, attempt, token, at, fp, id, by, owner, stored_tail, position, former, is_next
if raw and string.find(raw, '^%c') then
  raw, former = nil, raw  -- a turn: the task's key could run again before a deploy, and cannot now
elseif raw then
  readable, letter, attempt, token, at, fp, id, by, owner, stored_tail, position = pcall(struct.unpack, LAYOUT, raw)
  if not readable or not string.find(letter, '[WBAbaDTtVEX]') then
    return reply('corrupt', raw)
  elseif fp ~= '' and fingerprint ~= '' and fp ~= fingerprint then
    return reply('reused', raw)
  end
  -- The message that the record waits for: a retry, or the next one of a task that has replaced itself.
  is_next = string.find('WD', letter) and id == task_id and tonumber(generation) >= tonumber(owner)
  if string.find('VEX', letter) or letter == 'D' and not is_next or string.find('Tt', letter) and id ~= task_id then
    return reply('finished', raw)  -- most replays: reading the clock would take a quarter of their time
  end
end

local clock = redis.call('TIME')
seconds, microseconds = clock[1], clock[2]
local now_us = seconds * 1000000 + microseconds
local now = math.floor(now_us / 1000)
if now > tonumber(deadline_ms) then
  return reply('late', '')
end

-- Returns a record whose lease or reservation has not ended; else nil. A lease that has just ended is marked
-- by a small letter, and lasts for another tenth: see the head.
local function live(name, raw)
  if struct.unpack('>I6', raw, 10) > now then
    return raw
  elseif string.find(raw, '^[BAT]') then
    raw = string.lower(string.sub(raw, 1, 1)) .. string.sub(raw, 2, 9) .. struct.pack('>I6', now + lease_ms / 10)
      .. string.sub(raw, 16)
    redis.call('SET', name, raw, 'KEEPTTL')
    return raw
  end
end

-- Whether this delivery has begun the record before, and the reply was lost.
local is_resent = raw and string.sub(owner, 1, 8) == execution_id and string.find('BAba', letter)
local held = raw and not is_next and not is_resent and live(record, raw)
if raw and not held and string.find('Tt', letter) then
  -- The delivery that was to send the continuation has not, in its time: this one gets the right.
  raw = struct.pack(LAYOUT, 'T', attempt, token, now + lease_ms, #fp, fp, #id, id, #worker, worker, 0, '', #stored_tail,
    stored_tail) .. string.sub(raw, position)
  redis.call('SET', record, raw, 'KEEPTTL')
  return reply('send', raw)
end
local is_replaced = held and replaces == '1' and id ~= task_id
-- Whether this message has begun before or has the slot, so that publishers rely on its coming back.
local waits = turn and raw
local waiting = slot and redis.call('GET', slot)
if waiting then
  local _, _, _, ready, _, waiting_id = struct.unpack('>c1BI7I6Bc0I2c0', waiting)
  waiting = waiting_id == task_id
  if waiting then
    for _, name in ipairs({slot, record}) do
      redis.call('PEXPIRE', name, math.max(hold_ms, redis.call('PTTL', name)))
    end
    held, waits = held or ready > now and redis.call('GET', slot), true  -- until the end of its quiet time
  end
end
-- The highest token of the key so far; whether the record has the key, and not that of another message.
local last, has_turn = token or 0, not turn
local pointer = turn and redis.call('GET', turn) or former
if pointer and not held then
  if string.find(pointer, '^%a') then
    pointer = string.sub(pointer, 3, 9) .. turn  -- the record of a key that did not run again
  end
  local holder = string.sub(pointer, 8)
  last, has_turn = math.max(last, struct.unpack('>I7', pointer)), holder == record
  local other = not has_turn and redis.call('GET', holder)
  if other and string.find(other, '^[WBAba]') then
    held = live(holder, other)
    if replaces == '1' or not held then
      -- The other record gets a token that no execution has, so its execution can write nothing more. If it
      -- is replaced, its message has ended, and its body names the newer one.
      local letter, count, spent, at, fp, id, by, owner, stored_tail, position = struct.unpack(LAYOUT, other)
      local body = string.sub(other, position)
      if replaces == '1' or replaces == '2' and waiting then
        letter, at, owner, body = replaces == '1' and 'X' or 'D', now, '9999999999999999', task_id
      end
      redis.call('SET', holder, struct.pack(LAYOUT, letter, count, spent + 1, at, #fp, fp, #id, id, #by, by, #owner, owner,
        #stored_tail, stored_tail) .. body, 'KEEPTTL')
      held = nil
    end
  end
end
if held and not is_replaced then
  return reply(waits and 'wait' or 'held', held)
elseif is_resent and has_turn then
  raw = string.upper(letter) .. string.sub(raw, 2, 9) .. struct.pack('>I6', now + lease_ms) .. string.sub(raw, 16)
  redis.call('SET', record, raw, 'PX', ttl_ms)
  return reply('begun', raw)
end

local count, orphaned_ms, body = 1, '', ''
if raw and not is_replaced and letter ~= 'D' then
  count = math.max(1, math.min(255, attempt + (letter == 'a' and 1 or 0)))
  body = string.sub(raw, position)
  orphaned_ms = letter ~= 'W' and string.format('%.0f', now - at) or ''
  fingerprint = fingerprint == '' and fp or fingerprint
end
token = math.max(now_us, last + 1)
raw = struct.pack(LAYOUT, 'B', count, token, now + lease_ms, #fingerprint, fingerprint, #task_id, task_id, #worker,
  worker, 8 + #orphaned_ms, execution_id .. orphaned_ms, #tail, tail) .. body
redis.call('SET', record, raw, 'PX', ttl_ms)
if waiting then
  redis.call('DEL', slot)
end
if turn then
  redis.call('SET', turn, struct.pack('>I7', token) .. record, 'PX', ttl_ms)
end
return reply('begun', raw)
