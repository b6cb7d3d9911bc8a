-- mark_continued: notes that the continuation of a finished task has gone out.
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
local state, _, _, _, _, holder, _, _, _, position = unpack_record(raw or '')
local at, letter = 1, state
if state and not finished(state) then
  local from
  from, _, letter = find_error(raw, position, task_id)
  at, holder = from and from + 6, from and task_id
end
if holder ~= task_id then
  return reply('lost', raw)
end
letter = (letter == 'F' or letter == 'G') and 'G' or 'D'
redis.call('SET', record, string.sub(raw, 1, at - 1) .. letter .. string.sub(raw, at + 1), 'KEEPTTL')
return reply('ok')
