-- abandon: ends a dead execution's lease, so that the next begin takes over.
--
-- The parent process saw its child die, or is about to kill it. The token was in the child's memory,
-- so the execution is named by task id and worker; a child that has begun something else since is not
-- touched. The record gets a token that nobody holds: a child that lives a moment longer can neither
-- extend the lease nor complete.
--
-- KEYS
--   record             the key's record
-- ARGV
--   task_id            of the task that the child ran
--   worker             the child
--   grace_ms           how long the child may yet live; 0 when it is dead
-- REPLIES
--   ok                 the lease has ended
--   lost               that child does not hold the record; here is who does

local record = KEYS[1]
local task_id, worker, grace_ms = unpack(ARGV)

local now = ask_time()
local raw = redis.call('GET', record)
local state, attempt, token, at, fingerprint, holder, last_worker, _, _, position =
  unpack_record(raw or '')
if state ~= 'S' or holder ~= task_id or last_worker ~= worker then
  return reply('lost', raw)
end
local abandoned = pack('S', attempt, token + 1, math.min(at, now + grace_ms), fingerprint, holder,
  last_worker, '', '', string.sub(raw, position))
redis.call('SET', record, abandoned, 'KEEPTTL')
return reply('ok')
