-- The record's bytes and what every script needs of them. The loader puts this before each script.
-- Every call makes these functions anew, and pays for each name that one takes from outside itself.
--
-- One string a key, in the layout that celery_idempotent/record/layout.py describes: the letter of
-- the state, attempt, token, a time in milliseconds, and six strings. The token and the time stand
-- at fixed places, so that a heartbeat changes six bytes and reads none of the rest.
--
-- R reserved, S started, C completed, F failed. D and G are C and F once the continuation (callbacks,
-- the rest of a chain, a chord's count) has gone out, so that a redelivered message sends no second.
-- E released: only the errors of ended task ids are left, and to every other task id it is absent.

local LAYOUT = '>c1BI7I6Bc0I2c0Bc0Bc0Bc0'

-- Errors that ended one task id's execution and not the key. They stand before the steps in the body
-- of R, S and E, the latest first: each is an entry as a step's is, without a name. Length of the rest,
-- length of the name (0), F or G, generation of the message, time of the end, task id, format, error.
local ERROR = '>I4I2c1I7I6I2c0Bc0'
-- Bytes that the older ones may take when another is added.
local OLDER_ERRORS = 16384

-- In place of the generation that a record of R waits for.
local NOBODY = '-'

-- Server time, the only clock, in milliseconds and in microseconds. A token is the latter, so that it
-- grows even across forgotten records. Who goes by no time asks for none: a replay is a quarter faster.
local seconds, microseconds = '0', '0'
local function ask_time()
  local clock = redis.call('TIME')
  seconds, microseconds = clock[1], clock[2]
  local now_us = seconds * 1000000 + microseconds
  return math.floor(now_us / 1000), now_us
end

local function pack(state, attempt, token, at, fingerprint, task_id, worker, owner, format, body)
  return struct.pack(LAYOUT, state, attempt, token, at, #fingerprint, fingerprint, #task_id, task_id,
    #worker, worker, #owner, owner, #format, format) .. body
end

-- state, attempt, token, at, fingerprint, task_id, worker, owner, format, position of the body.
-- A state of nil: not a record of this layout.
local function unpack_record(raw)
  local readable, state, attempt, token, at, fingerprint, task_id, worker, owner, format, body =
    pcall(struct.unpack, LAYOUT, raw)
  if readable and string.find('RSCDFGE', state, 1, true) then
    return state, attempt, token, at, fingerprint, task_id, worker, owner, format, body
  end
end

local function finished(state)
  return string.find('CDFG', state)
end

-- The error at `position`: where the next entry starts, letter, generation, time, task id, format,
-- position of the error. Nothing, if what is there is a step or the end.
local function error_at(raw, position)
  local _, length, name, letter, generation, at, task_id, format, start =
    pcall(struct.unpack, ERROR, raw, position)
  if name == 0 then
    return position + 4 + length, letter, generation, at, task_id, format, start
  end
end

-- The error of `task_id` in the body at `position`: where it starts, and then as `error_at`.
local function find_error(raw, position, task_id)
  for _ = 1, #raw do
    local after, letter, generation, at, ended, format, start = error_at(raw, position)
    if not after then
      return
    elseif ended == task_id then
      return position, after, letter, generation, at, format, start
    end
    position = after
  end
end

-- Where the steps start in the body at `position`, and where the errors end that have room beside
-- another one.
local function skip_errors(raw, position)
  local steps, older = position, position
  for _ = 1, #raw do
    local after = error_at(raw, steps)
    if not after then
      break
    end
    steps = after
    if after - position <= OLDER_ERRORS then
      older = after
    end
  end
  return steps, older
end

-- Whether the body at `position` holds errors at most: who sent no message that they answer finds
-- the key absent, once nobody has it.
local function no_steps(raw, position)
  return skip_errors(raw, position) > #raw
end

-- The body at `position` with one more error before the others.
local function with_error(raw, position, task_id, generation, now, format, error)
  local steps, older = skip_errors(raw, position)
  return struct.pack(ERROR, 19 + #task_id + #format + #error, 0, 'F', generation, now, #task_id,
    task_id, #format, format) .. error .. string.sub(raw, position, older - 1) .. string.sub(raw, steps)
end

-- What the outcome of a task that has replaced itself is made of: the generation from which on a message
-- of its id goes on under the key, and where its finished steps start. Nothing, if it is another outcome.
local function replacement(raw, format, position)
  if string.sub(format, 1, 1) == '=' then
    local readable, generation, _, steps = pcall(struct.unpack, '>I7I2c0', raw, position)
    if readable then
      return generation, steps
    end
  end
end

-- Whether `raw` is STARTED under `token`; reads those two fields alone. Numbers are exact up to 2^53,
-- which microseconds reach in 2255.
local function holds(raw, token)
  return raw and #raw >= 16 and string.sub(raw, 1, 1) == 'S'
    and struct.unpack('>I7', raw, 3) == tonumber(token)
end

local function with_time(raw, at)
  return string.sub(raw, 1, 9) .. struct.pack('>I6', at) .. string.sub(raw, 16)
end

local function differ(one, other)
  return one ~= '' and other ~= '' and one ~= other
end

-- Each reply names its case first, then the time that it goes by, then gives what is there: a caller
-- that measures how long something still lasts must not ask its own clock. One string, since a list
-- costs a client more to read than all the rest of it; the time as Redis gave it, since Lua is slow to
-- write a number.
local function reply(case, raw)
  return case .. ' ' .. seconds .. ' ' .. microseconds .. ' ' .. (raw or '')
end
