"""Mutants of the Lua that compute the same as the original, each with the reason.

By name, as `lua_mutants.Mutant.name` writes it, so that a reason outlives a move of its line.
"""

from __future__ import annotations

_BY_REASON = {
    # Where there is no record, whatever is no record will do.
    "nil, like any text that is no record, cannot be read": """
abandon: unpack_record(raw or '')  ⟶  raw or '' becomes raw
abandon: unpack_record(raw or '')  ⟶  '' becomes '?'
mark_continued: local state, _, _, _, _, holder, _, _, _, position = unpack_record(raw or '')  ⟶  raw or '' becomes raw
mark_continued: local state, _, _, _, _, holder, _, _, _, position = unpack_record(raw or '')  ⟶  '' becomes '?'
epilogue: local state, attempt, last_token, _, fingerprint, task_id, worker = unpack_record(raw or '')  ⟶  raw or '' becomes raw
epilogue: local state, attempt, last_token, _, fingerprint, task_id, worker = unpack_record(raw or '')  ⟶  '' becomes '?'
save_step: local state, _, last_token = unpack_record(raw or '')  ⟶  raw or '' becomes raw
save_step: local state, _, last_token = unpack_record(raw or '')  ⟶  '' becomes '?'
""",
    "two fingerprints differ, whichever is named first": """
begin: if differ(known, fingerprint)  ⟶  known, fingerprint becomes fingerprint, known
reserve: elseif differ(known, fingerprint)  ⟶  known, fingerprint becomes fingerprint, known
""",
    "Lua takes a position of 0, or none, for the first": """
begin: local unanswered = state == 'S' and last_execution_id ~= '' and string.find(unanswered_ids, last_execution_id, 1, true)  ⟶  1 becomes 0
begin: local unanswered = state == 'S' and last_execution_id ~= '' and string.find(unanswered_ids, last_execution_id, 1, true)  ⟶  1 becomes nil
mark_continued: redis.call('SET', record, string.sub(raw, 1, at - 1) .. letter .. string.sub(raw, at + 1), 'KEEPTTL')  ⟶  1 becomes 0
get: if not raw or string.sub(raw, 1, 1) == 'E' then  ⟶  1 becomes 0
prelude: if string.sub(format, 1, 1) == '=' then  ⟶  1 becomes 0
prelude: if readable and string.find('RSCDFGE', state, 1, true) then  ⟶  1 becomes 0
prelude: if readable and string.find('RSCDFGE', state, 1, true) then  ⟶  1 becomes nil
prelude: return raw and #raw >= 16 and string.sub(raw, 1, 1) == 'S'  ⟶  1 becomes 0
prelude: return string.sub(raw, 1, 9) .. struct.pack('>I6', at) .. string.sub(raw, 16)  ⟶  1 becomes 0
""",
    "a number is a format that yields itself": """
begin: idle = string.format('%.0f', math.max(0, now - at))  ⟶  '%.0f', math.max(0, now - at) becomes math.max(0, now - at), '%.0f'
""",
    "no generation is below 0": """
begin: awaited = last_execution_id == '' and 0 or tonumber(last_execution_id)  ⟶  0 becomes -1
""",
    "an error takes many bytes: the loop always ends before its turns are used up": """
prelude: for _ = 1, #raw do  ⟶  1 becomes 0
prelude: for _ = 1, #raw do  ⟶  1 becomes 2
""",
    "nothing is found at no position, in however many turns": """
prelude: if not after then  ⟶  not after becomes false
""",
    "what stands in place of the state of an unreadable record is an error's text, no letter": """
prelude: if readable and string.find('RSCDFGE', state, 1, true) then  ⟶  readable and string.find('RSCDFGE', state, 1, true) becomes string.find('RSCDFGE', state, 1, true)
""",
    "the shortest record has 21 bytes; what is cut to 15 is no better than what is cut to 16": """
prelude: return raw and #raw >= 16 and string.sub(raw, 1, 1) == 'S'  ⟶  16 becomes 15
prelude: return raw and #raw >= 16 and string.sub(raw, 1, 1) == 'S'  ⟶  16 becomes 17
prelude: return raw and #raw >= 16 and string.sub(raw, 1, 1) == 'S'  ⟶  >= becomes >
""",
}  # fmt: skip

SURVIVORS: dict[str, str] = {
    name: reason for reason, names in _BY_REASON.items() for name in names.strip().splitlines()
}
