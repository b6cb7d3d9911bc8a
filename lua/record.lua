-- The record's bytes and what every script needs of them. The loader puts this before each script.
--
-- One string a key, in the layout that celery_idempotent/record/layout.py describes: the letter of
-- the state, attempt, token, a time in milliseconds, and six strings. The token and the time stand
-- at fixed places, so that a heartbeat changes six bytes and reads none of the rest.
--
-- R reserved, S started, C completed, F failed. D and G are C and F once the continuation (callbacks,
-- the rest of a chain, a chord's count) has gone out, so that a redelivered message sends no second.

local LAYOUT = '>c1BI7I6Bc0I2c0Bc0Bc0Bc0'
local TOKEN, AT, AFTER = 3, 10, 16

-- Server time, the only clock. Token = microseconds, so that it grows even across forgotten records.
local clock = redis.call('TIME')
local now_us = clock[1] * 1000000 + clock[2]
local now = math.floor(now_us / 1000)

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
  return raw and #raw >= AFTER and string.sub(raw, 1, 1) == 'S'
    and struct.unpack('>I7', raw, TOKEN) == tonumber(token)
end

local function with_time(raw, at)
  return string.sub(raw, 1, AT - 1) .. struct.pack('>I6', at) .. string.sub(raw, AFTER)
end

local function differ(one, other)
  return one ~= '' and other ~= '' and one ~= other
end

-- Each reply names its case first, then the time, then gives what is there: a caller that measures
-- how long something still lasts must not ask its own clock. One string, since a list costs a client
-- more to read than all the rest of it.
local function reply(case, raw)
  return case .. ' ' .. now .. ' ' .. (raw or '')
end

-- STARTED under `token` becomes `state`, with its outcome. What the execution needed goes.
local function settle(record, state, token, format, body, retention_ms)
  local raw = redis.call('GET', record)
  local held, attempt, last_token, _, fingerprint, task_id, worker = unpack_record(raw or '')
  if last_token ~= tonumber(token) then
    return false, raw
  end
  if held == 'S' then
    redis.call('SET', record, pack(state, attempt, last_token, now, fingerprint, task_id, worker,
      '', format, body), 'PX', retention_ms)
    return true
  end
  if held == state then
    -- Stored already: the reply to the first try was lost, and the client has sent it again. A WAIT
    -- behind it speaks of what this connection has written, so write.
    redis.call('PEXPIRE', record, retention_ms)
  end
  return held == state, raw
end
