-- mark_continued: marks that the continuation of a finished task has been sent.
--
-- A redelivery of the same message then replays without sending callbacks, the rest of a chain or a
-- chord's count again. Another task id has a continuation of its own.
--
-- KEYS
--   record             the key's record
-- ARGV
--   task_id            of the task whose continuation was sent
-- REPLIES
--   ok                 marked
--   lost               this record is not the outcome of that task id; the current record

local record = KEYS[1]
local task_id = ARGV[1]

local raw = redis.call('GET', record)
local state, _, _, _, _, stored_task_id, _, _, _, position = unpack_record(raw or '')
local letter_position, letter = 1, state
if state and not is_finished(state) then
  local error_start
  error_start, _, letter = find_error(raw, position, task_id)
  letter_position, stored_task_id = error_start and error_start + 6, error_start and task_id
end
if stored_task_id ~= task_id then
  return reply('lost', raw)
end
letter = (letter == 'F' or letter == 'G') and 'G' or 'D'
redis.call('SET', record, string.sub(raw, 1, letter_position - 1) .. letter .. string.sub(raw, letter_position + 1),
  'KEEPTTL')
return reply('ok')
