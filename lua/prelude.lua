-- The functions that the scripts share. The loader puts this file before each script, or where a script
-- has the line PRELUDE. Every call creates these functions again and pays for each outer name that one of
-- them uses.
--
-- A record is one string, in the layout that celery_idempotent/record/layout.py describes: a letter for
-- the state, attempt, token, a time in milliseconds, five strings with their lengths, and the body. The
-- token and the time are at fixed positions, so that extend changes six bytes and parses nothing else.
--
-- R reserved, S started, C completed, F failed. P and Q are C and F while the continuation (callbacks, the
-- rest of a chain, a chord's count) is being sent: by the delivery whose execution id is in the owner
-- field, until the deadline after that id, unless that delivery renews it.
-- A message has a root, which all its copies and retries share; a second publish under its task id has
-- another one. Data of one message, not of the key, form an entry: a key beside the record, whose name
-- ends with the root. It has the form of a record, with the message's generation in place of the token. F
-- and Q are the error that ended the message; C and P say that a duplicate has a continuation of its own.
--
-- A key that may run again (idempotency_until) has two kinds of records. Each of its task ids has a record
-- of its own, which only messages with that id use, so all of the above holds for it. A message that is
-- published again under the id runs, and the earlier outcome becomes an entry. The record under the key's
-- own name is the turn: an execution takes it for its lease. Its body holds no steps, but at
-- most one entry: the message that waits for the next turn. Scripts get the turn as their last key.

-- The message that waits, in the body of a turn. It has the form of a step without a name: length of the
-- rest, length of the name (0), W, zero, end of its reservation, task id, fingerprint.
local WAITING = '>I4I2c1I7I6I2c0Bc0'

-- Bytes of a root, and of an execution id.
local ID = 8

-- Owner of an R record that is not reserved for any message.
local NOBODY = '-'

-- Server time, in milliseconds and in microseconds. A token is the latter, so that it grows even across
-- forgotten records. Scripts that need no clock skip TIME: that makes a replay a quarter faster.
local seconds, microseconds = '0', '0'
local function read_clock()
  local clock = redis.call('TIME')
  seconds, microseconds = clock[1], clock[2]
  local now_us = seconds * 1000000 + microseconds
  return math.floor(now_us / 1000), now_us
end

local function pack(state, attempt, token, at, fingerprint, task_id, worker, owner, format, body)
  return struct.pack(LAYOUT, state, attempt, token, at, #fingerprint, fingerprint, #task_id, task_id,
    #worker, worker, #owner, owner, #format, format) .. body
end

-- Returns state, attempt, token, at, fingerprint, task_id, worker, owner, format and the position of the
-- body; nothing if `raw` is not a record of this layout.
local function unpack_record(raw)
  -- If `raw` cannot be unpacked, `state` is an error message.
  local _, state, attempt, token, at, fingerprint, task_id, worker, owner, format, body =
    pcall(struct.unpack, LAYOUT, raw)
  if string.match(state, '^[RSCF]$') or string.match(state, '^[PQ]$') and #owner == 22 then
    return state, attempt, token, at, fingerprint, task_id, worker, owner, format, body
  end
end

local function is_finished(state)
  return string.find('CFPQ', state)
end

local function is_sending(state)
  return string.find('PQ', state)
end

-- Whether nothing but attempts is left of an execution whose death ended its message. For all other
-- purposes the key is absent.
local function is_remnant(owner, raw, position)
  return owner == NOBODY and position > #raw
end

-- The owner field has the root and the execution id; while a continuation is being sent, also the deadline.
local function root_of(owner)
  return string.sub(owner, 1, ID)
end

local function execution_of(owner)
  return string.sub(owner, ID + 1, 2 * ID)
end

local function with_deadline(owner, till)
  return string.sub(owner, 1, 2 * ID) .. struct.pack('>I6', till)
end

local function deadline_of(owner)
  return struct.unpack('>I6', owner, 2 * ID + 1)
end

-- Returns the letter and the owner of an outcome, 'C' or 'F': the delivery that has stored it sends its
-- continuation, if any, within `lease_ms`.
local function sending(letter, owner, now, lease_ms)
  if lease_ms == '' or lease_ms == '0' then
    return letter, owner
  end
  return letter == 'C' and 'P' or 'Q', with_deadline(owner, now + lease_ms)
end

-- Reads the outcome of a task that replaced itself. Returns the generation of the first message that
-- continues under the key, and where the finished steps start; nothing for any other outcome.
local function read_replacement(raw, format, position)
  if string.match(format, '^=') then
    local readable, generation, _, steps = pcall(struct.unpack, '>I7I2c0', raw, position)
    if readable then
      return generation, steps
    end
  end
end

-- Returns the body of a turn that reserves the next turn for a message, until `till`.
local function pack_waiting(till, task_id, fingerprint)
  return struct.pack(WAITING, 19 + #task_id + #fingerprint, 0, 'W', 0, till, #task_id, task_id,
    #fingerprint, fingerprint)
end

-- Reads the waiting message in the record of a turn, whose body is at `position`. Returns its entry, the end
-- of its reservation, its task id and fingerprint; nothing if none waits, or its reservation has ended.
local function read_waiting(turn_raw, position, now)
  local _, length, name, _, _, till, task_id, fingerprint = pcall(struct.unpack, WAITING, turn_raw, position)
  if name == 0 and till > now then
    return string.sub(turn_raw, position, position + 3 + length), till, task_id, fingerprint
  end
end

-- Ends a turn and reserves the next one for the message that waits. If none waits, the record of the
-- turn becomes `last` for `ttl_ms`, or is deleted.
local function end_turn(turn, turn_raw, now, last, ttl_ms)
  local _, _, token, _, _, _, _, _, _, position = unpack_record(turn_raw)
  local waiting, till, task_id, fingerprint = read_waiting(turn_raw, position, now)
  if waiting then
    redis.call('SET', turn, pack('R', 0, token, till, fingerprint, task_id, '', '', '', ''), 'PX', till - now)
  elseif last then
    redis.call('SET', turn, last, 'PX', ttl_ms)
  else
    redis.call('DEL', turn)
  end
end

-- A call that meets a running execution comes back for its outcome. The format field of S, and of R for a
-- retry, ends with a comma and the time in milliseconds until which it may come back.
local function read_met(format)
  return string.match(format, ',%d+$') or ''
end

-- Returns how long an outcome is kept: at least until the calls that met its execution have come back.
local function kept_ms(format, retention_ms, now)
  local till = string.match(format, ',(%d+)$')
  return till and math.max(retention_ms, till - now) or retention_ms
end

-- Stores the error that ended a message beside the record, for its copies. `owner` is that of the execution.
local function leave_error(entry, now, owner, task_id, worker, generation, format, error, error_ms, lease_ms)
  local letter
  letter, owner = sending('F', owner, now, lease_ms)
  redis.call('SET', entry, pack(letter, 0, generation, now, '', task_id, worker, owner, format, error), 'PX', error_ms)
end

-- Whether `raw` is STARTED under `token`; reads those two fields only. Numbers are exact up to 2^53,
-- which microseconds reach in 2255.
local function is_held_by(raw, token)
  return raw and string.sub(raw, 1, 1) == 'S' and string.sub(raw, 3, 9) == struct.pack('>I7', token)
end

local function with_time(raw, at)
  return string.sub(raw, 1, 9) .. struct.pack('>I6', at) .. string.sub(raw, 16)
end

-- Whether two fingerprints, each with the label that follows its 8 bytes, are of different arguments.
-- Zeros stand for no fingerprint.
local function differ(fingerprint, other)
  fingerprint, other = string.sub(fingerprint, 1, 8), string.sub(other, 1, 8)
  return fingerprint ~= other and string.match(fingerprint, '[^%z]') and string.match(other, '[^%z]')
end

-- Builds a reply: the case, the server time that the script used, and a record. The time is included
-- because a caller must not use its own clock to compute how long a lease still lasts. The reply is one
-- string, since clients parse lists much more slowly; the time is copied as Redis wrote it, since Lua
-- formats numbers slowly.
local function reply(case, raw)
  return case .. ' ' .. seconds .. ' ' .. microseconds .. ' ' .. (raw or '')
end
