-- The record's bytes and what every script needs of them. The loader puts this before each script.
-- Every call makes these functions anew, and pays for each name that one takes from outside itself.
--
-- One string a key, in the layout that celery_idempotent/record/layout.py describes: the letter of
-- the state, attempt, token, a time in milliseconds, and six strings. The token and the time stand
-- at fixed places, so that a heartbeat changes six bytes and reads none of the rest.
--
-- R reserved, S started, C completed, F failed. D and G are C and F once the continuation (callbacks,
-- the rest of a chain, a chord's count) has gone out, so that a redelivered message sends no second.

local LAYOUT = '>c1BI7I6Bc0I2c0Bc0Bc0Bc0'

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
  if readable and string.find('RSCDFG', state, 1, true) then
    return state, attempt, token, at, fingerprint, task_id, worker, owner, format, body
  end
end

local function finished(state)
  return state ~= 'R' and state ~= 'S'
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
