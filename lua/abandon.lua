-- abandon: ends a dead execution's lease at once, so that the next begin takes over.
--
-- The parent process saw its child die. The token was in the child's memory, so the execution is
-- named by task id and worker; a child that has begun something else since is not touched.
--
-- KEYS
--   record             the key's record
-- ARGV
--   task_id            of the task that the child ran
--   worker             the child
-- REPLIES
--   ok                 the lease has ended
--   lost               that child does not hold the record; here is who does

local record = KEYS[1]
local task_id, worker = unpack(ARGV)

local raw = redis.call('GET', record)
local state, holder, last_worker
if raw then
  local _
  state, _, _, _, _, holder, last_worker = unpack_record(raw)
end
if state ~= 'S' or holder ~= task_id or last_worker ~= worker then
  return reply('lost', raw)
end
redis.call('SET', record, with_time(raw, now), 'KEEPTTL')
return reply('ok')
