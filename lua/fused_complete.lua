-- fused_complete: as complete, and writes the result of the task as its result backend does.
--
-- Celery writes the result of a task once more, for its result backend: it reads what is there, keeps it
-- if that is a success, else stores the result and publishes it for callers that wait. This script does the
-- same, and only if the outcome is stored. It leaves a value that may be a success to Celery, and replies
-- `ok`. It also replies `ok` to a resent call, unless the value that the first one wrote is still there.
-- A task that is completed this way has no continuation.
-- For a replay, whose outcome is in the record already, it only writes the result.
--
-- INCLUDE
--   epilogue           changes the record to `outcome`
-- KEYS
--   record             the key's record; if the key may run again, the message's
--   result             the task's result in the result backend
--   turn               the key's record, if the key may run again
-- ARGV
--   token              of the execution; 0: a replay, which leaves the record as it is
--   format             encoding of the result, or '' if no result is stored
--   body               the result, or the reason why none is stored
--   retention_ms       how long the outcome is kept
--   meta               what the result backend stores
--   expires            seconds for which it stores that; 0: for ever
-- REPLIES
--   written            stored, and the result backend has the result
--   ok                 stored; the result backend is as it was
--   lost               the token does not hold the record; the current record

local record, result, turn = unpack(KEYS)
local token, format, body, retention_ms, meta, expires = unpack(ARGV)
local outcome, lease_ms = 'C', ''

if token ~= '0' and not turn then
  local _, state, attempt, stored_token, _, fingerprint, task_id, worker, _, stored_format =
    pcall(struct.unpack, LAYOUT, redis.call('GET', record))
  if state == 'S' and stored_token == tonumber(token) and stored_format == ''
      and redis.pcall('GET', result) == false then
    -- Most completions. They end here, before the prelude: its functions cost more than this does.
    local clock = redis.call('TIME')
    local now = clock[1] * 1000 + clock[2] / 1000
    redis.call('SET', record, struct.pack(LAYOUT, outcome, attempt, stored_token, now, #fingerprint, fingerprint,
      #task_id, task_id, #worker, worker, 0, '', #format, format) .. body, 'PX', retention_ms)
    local is_written = type(redis.pcall('PUBLISH', result, meta)) == 'number'
    if is_written then
      redis.call('SET', result, meta, unpack(expires == '0' and {} or {'EX', expires}))
    end
    return (is_written and 'written ' or 'ok ') .. clock[1] .. ' ' .. clock[2] .. ' '
  end
end

-- PRELUDE

-- Every serializer of Celery writes these words as they are; compression may hide both of them.
local function may_replace(stored)
  return stored == false or type(stored) == 'string'
    and string.find(stored, 'status') and not string.find(stored, 'SUCCESS')
end

-- The end of the script calls this in place of the prelude's, with a record if the call was resent.
local plain_reply = reply
local reply = function(case, raw)
  if case == 'lost' then
    return plain_reply('lost', raw)
  end
  -- The record is stored: an error of these commands is left to Celery, which will get it too.
  local stored = redis.pcall('GET', result)
  local is_written = stored == meta
  if not raw and may_replace(stored) and type(redis.pcall('PUBLISH', result, meta)) == 'number' then
    is_written = true
    redis.call('SET', result, meta, unpack(expires == '0' and {} or {'EX', expires}))
  end
  return plain_reply(is_written and 'written' or 'ok', raw)
end

if token == '0' then
  return reply('ok')
end
