-- abandon: ends a dead execution's lease, so that the next begin takes over.
--
-- The parent process saw its child die, or is about to kill it. The token was in the child's memory,
-- so the execution is named by task id and worker; a child that has begun something else since is not
-- touched. The record gets a token that nobody holds: a child that lives a moment longer can neither
-- extend the lease nor complete.
--
-- Where the message does not go back to the broker, the death is the last word for its task id: copies
-- of the message get the error, as after `release`. It is a death all the same, and is counted.
--
-- KEYS
--   record             the key's record
-- ARGV
--   task_id            of the task that the child ran
--   worker             the child
--   grace_ms           how long the child may yet live; 0 when it is dead
--   generation         of the message
--   format             how the error is written
--   error              the error, or the reason why it is not kept; '' where the message goes back
--   error_ms           how long it is kept
-- REPLIES
--   ok                 the lease has ended
--   lost               that child does not hold the record; here is who does

local record = KEYS[1]
local task_id, worker, grace_ms, generation, format, error, error_ms = unpack(ARGV)

local now = ask_time()
local raw = redis.call('GET', record)
local state, attempt, token, at, fingerprint, holder, last_worker, _, _, position =
  unpack_record(raw or '')
if not state or finished(state) or holder ~= task_id or last_worker ~= worker then
  return reply('lost', raw)
elseif state ~= 'S' then
  -- Only an abandoned execution leaves its worker in a record that nobody has the lease of.
  return reply('ok')
end
local left, body = 'S', string.sub(raw, position)
if error ~= '' then
  left, body = 'R', with_error(raw, position, task_id, generation, now, format, error)
  if no_steps(body, 1) then
    left, fingerprint = 'E', ''
  end
end
local abandoned = pack(left, attempt, token + 1, math.min(at, now + grace_ms), fingerprint, holder,
  last_worker, left == 'S' and '' or NOBODY, '', body)
redis.call('SET', record, abandoned, 'KEEPTTL')
if left == 'E' then
  redis.call('PEXPIRE', record, error_ms)
end
return reply('ok')
