-- The functions that the scripts share. The loader puts this file before each script, or where a script
-- has the line PRELUDE. Every call creates these functions again and pays for each outer name that one of
-- them uses.
--
-- A record is one string, in the layout that celery_idempotent/record/layout.py describes: a letter for
-- the state, attempt, token, a time in milliseconds, five strings with their lengths, and the body. The
-- token and the time are at fixed positions, so that extend changes six bytes and parses nothing else.
--
-- R reserved, S started, C completed, F failed. D and G are C and F after the continuation (callbacks,
-- the rest of a chain, a chord's count) has been sent, so that a redelivered message does not send it
-- again. E released: the body holds only errors of ended task ids; for every other task id the key is
-- absent.
--
-- A key that may run again (idempotency_until) has two kinds of records. Each of its messages has a record
-- of its own, which only copies of that message meet, so all of the above holds for it. The record under
-- the key's own name is the turn: who begins takes it, for as long as the lease. Its body holds neither
-- errors nor steps, but at most one entry: the message that waits for the next turn. Scripts get it as
-- their second key; the first comments name both.

-- An error that ended one task id, but not the key. These errors precede the steps in the body of R, S
-- and E, newest first. Each is an entry like a step's, without a name: length of the rest, length of the
-- name (0), F or G, generation of the message, time of the end, task id, format, error.
local ERROR = '>I4I2c1I7I6I2c0Bc0'
-- Bytes that older errors may take when another one is added.
local OLDER_ERRORS = 16384

-- Owner of an R or E record that is not reserved for any message.
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
  local readable, state, attempt, token, at, fingerprint, task_id, worker, owner, format, body =
    pcall(struct.unpack, LAYOUT, raw)
  if readable and string.find('RSCDFGE', state, 1, true) then
    return state, attempt, token, at, fingerprint, task_id, worker, owner, format, body
  end
end

local function is_finished(state)
  return string.find('CDFG', state)
end

-- Reads the error at `position`. Returns the position of the next entry, letter, generation, time, task
-- id, format and the position of the error; nothing if a step or the end of the record is there.
local function read_error(raw, position)
  local _, length, name, letter, generation, at, task_id, format, start =
    pcall(struct.unpack, ERROR, raw, position)
  if name == 0 then
    return position + 4 + length, letter, generation, at, task_id, format, start
  end
end

-- Finds the error of `task_id` in the body at `position`. Returns its position, then what `read_error`
-- returns.
local function find_error(raw, position, task_id)
  for _ = 1, #raw do
    local next_entry, letter, generation, at, ended_task_id, format, start = read_error(raw, position)
    if not next_entry then
      return
    elseif ended_task_id == task_id then
      return position, next_entry, letter, generation, at, format, start
    end
    position = next_entry
  end
end

-- Returns where the steps start in the body at `position`, and where the errors end that may stay when
-- another one is added.
local function skip_errors(raw, position)
  local steps, kept_end = position, position
  for _ = 1, #raw do
    local next_entry = read_error(raw, steps)
    if not next_entry then
      break
    end
    steps = next_entry
    if next_entry - position <= OLDER_ERRORS then
      kept_end = next_entry
    end
  end
  return steps, kept_end
end

-- Whether the body at `position` holds at most errors. Once its lease or reservation has ended, such a
-- record counts as absent for every task id that has no error in it.
local function has_no_steps(raw, position)
  return skip_errors(raw, position) > #raw
end

-- Returns the body at `position` with one more error before the others. `letter`: F if none is given.
local function prepend_error(raw, position, task_id, generation, now, format, error, letter)
  local steps, kept_end = skip_errors(raw, position)
  return struct.pack(ERROR, 19 + #task_id + #format + #error, 0, letter or 'F', generation, now, #task_id,
    task_id, #format, format) .. error .. string.sub(raw, position, kept_end - 1) .. string.sub(raw, steps)
end

-- Reads the outcome of a task that replaced itself. Returns the generation of the first message that
-- continues under the key, and where the finished steps start; nothing for any other outcome.
local function read_replacement(raw, format, position)
  if string.sub(format, 1, 1) == '=' then
    local readable, generation, _, steps = pcall(struct.unpack, '>I7I2c0', raw, position)
    if readable then
      return generation, steps
    end
  end
end

-- Returns the entry in the record of a turn that reserves the next turn for a message until `till`. It has
-- the form of an error: where that has its format, it has the fingerprint.
local function pack_waiting(till, task_id, fingerprint)
  return struct.pack(ERROR, 19 + #task_id + #fingerprint, 0, 'W', 0, till, #task_id, task_id,
    #fingerprint, fingerprint)
end

-- Reads who waits in the record of a turn, whose body is at `position`. Returns the entry, the end of the
-- reservation, the task id and the fingerprint; nothing if no message waits, or its reservation has ended.
local function read_waiting(turn_raw, position, now)
  local next_entry, letter, _, till, task_id, fingerprint = read_error(turn_raw, position)
  if letter == 'W' and till > now then
    return string.sub(turn_raw, position, next_entry - 1), till, task_id, fingerprint
  end
end

-- Ends a turn. The message that waits for the next one has it reserved. Without one, the record of the
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

-- A call that meets an execution comes back for its outcome. Until when it may come is in the format field
-- of S, and of R for a retry: a comma and milliseconds, at the end.
local function read_met(format)
  return string.match(format, ',%d+$') or ''
end

-- Returns how long an outcome is kept: at least until those who have met its execution may come back.
local function kept_ms(format, retention_ms, now)
  local till = string.match(format, ',(%d+)$')
  return till and math.max(retention_ms, till - now) or retention_ms
end

-- Whether `raw` is STARTED under `token`; parses those two fields only. Numbers are exact up to 2^53,
-- which microseconds reach in 2255.
local function is_held_by(raw, token)
  return raw and #raw >= 16 and string.sub(raw, 1, 1) == 'S'
    and struct.unpack('>I7', raw, 3) == tonumber(token)
end

local function with_time(raw, at)
  return string.sub(raw, 1, 9) .. struct.pack('>I6', at) .. string.sub(raw, 16)
end

-- Whether two fingerprints, each with the label that follows its 8 bytes, are of different arguments.
-- Zeros are no fingerprint.
local function differ(fingerprint, other)
  if fingerprint == '' or other == '' or fingerprint == other then
    return false
  end
  local none = '\0\0\0\0\0\0\0\0'
  fingerprint, other = string.sub(fingerprint, 1, 8), string.sub(other, 1, 8)
  return fingerprint ~= none and other ~= none and fingerprint ~= other
end

-- Builds a reply: the case, the server time that the script used, and a record. The time is included
-- because a caller must not use its own clock to compute how long a lease still lasts. The reply is one
-- string, since clients parse lists much more slowly; the time is copied as Redis wrote it, since Lua
-- formats numbers slowly.
local function reply(case, raw)
  return case .. ' ' .. seconds .. ' ' .. microseconds .. ' ' .. (raw or '')
end
