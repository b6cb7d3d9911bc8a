-- dispatched: notes that the continuation of a finished task has gone out.
--
-- A redelivery of the same message then replays without sending callbacks, the rest of a chain or a
-- chord's count a second time. Another task id is a caller of its own and has its own continuation.
--
-- KEYS
--   record             the key's record
-- ARGV
--   task_id            of the task whose continuation it was
-- REPLIES
--   ok                 noted
--   lost               that task id did not finish this record

local record = KEYS[1]
local task_id = ARGV[1]

local raw = redis.call('GET', record)
local state, _, _, _, _, holder = unpack_record(raw or '')
if not state or not finished(state) or holder ~= task_id then
  return reply('lost', raw)
end
local letter = (state == 'F' or state == 'G') and 'G' or 'D'
redis.call('SET', record, letter .. string.sub(raw, 2), 'KEEPTTL')
return reply('ok')
