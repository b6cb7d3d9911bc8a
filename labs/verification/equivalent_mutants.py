"""Lists the mutants of the Lua scripts that are equivalent to the original, each with the reason.

Mutants are listed by `lua_mutants.Mutant.name`, which does not change when a line moves.
"""

from __future__ import annotations

_BY_REASON = {
    "a letter is found in the list of letters, whichever of the two is the pattern": r"""
begin: if not readable or not string.find(letter, '[WBAbaDTtVEX]') then  ⟶  letter, '[WBAbaDTtVEX]' becomes '[WBAbaDTtVEX]', letter
forget: if not readable or not string.find(letter, '[WBAbaDTtVEX]') then  ⟶  letter, '[WBAbaDTtVEX]' becomes '[WBAbaDTtVEX]', letter
""",
    "Lua treats position 0 as the first one": r"""
begin: raw = string.lower(string.sub(raw, 1, 1)) .. string.sub(raw, 2, 9) .. struct.pack('>I6', now + lease_ms / 10)  ⟶  1 becomes 0
begin: local is_resent = raw and string.sub(owner, 1, 8) == execution_id and string.find('BAba', letter)  ⟶  1 becomes 0
""",
    "only the owner of an execution is the id of a delivery": r"""
begin: local is_resent = raw and string.sub(owner, 1, 8) == execution_id and string.find('BAba', letter)  ⟶  raw and string.sub(owner, 1, 8) == execution_id and string.find('BAba', letter) becomes raw and string.sub(owner, 1, 8) == execution_id
""",
    "of an outcome whose continuation is to be sent, the lease is marked before it is free": r"""
begin: if raw and not held and string.find('Tt', letter) then  ⟶  'Tt' becomes 't'
""",
    "the time in microseconds is greater": r"""
begin: local last, has_turn = token or 0, not turn  ⟶  0 becomes -1
begin: local last, has_turn = token or 0, not turn  ⟶  0 becomes 1
""",
    "a number used as the format string yields itself": r"""
begin: orphaned_ms = letter ~= 'W' and string.format('%.0f', now - at) or ''  ⟶  '%.0f', now - at becomes now - at, '%.0f'
""",
    "struct.pack cuts the fraction of a number": r"""
extend: local now = clock[1] * 1000 + math.floor(clock[2] / 1000)  ⟶  math.floor(clock[2] / 1000) becomes clock[2] / 1000
settle: local now = clock[1] * 1000 + math.floor(clock[2] / 1000)  ⟶  math.floor(clock[2] / 1000) becomes clock[2] / 1000
abandon: local now = clock[1] * 1000 + math.floor(clock[2] / 1000)  ⟶  math.floor(clock[2] / 1000) becomes clock[2] / 1000
""",
    "what cannot be unpacked has neither a letter nor a token": r"""
settle: pcall(struct.unpack, LAYOUT, raw or '')  ⟶  raw or '' becomes raw
settle: pcall(struct.unpack, LAYOUT, raw or '')  ⟶  '' becomes '?'
abandon: local readable, letter, attempt, token, at, fingerprint, id, by, _, tail, position = pcall(struct.unpack, LAYOUT, raw or '')  ⟶  raw or '' becomes raw
abandon: local readable, letter, attempt, token, at, fingerprint, id, by, _, tail, position = pcall(struct.unpack, LAYOUT, raw or '')  ⟶  '' becomes '?'
settle: elseif not readable or stored ~= tonumber(token) then  ⟶  not readable or stored ~= tonumber(token) becomes stored ~= tonumber(token)
abandon: if readable and string.find('BAbaTt', letter) and id == task_id and by == worker then  ⟶  readable and string.find('BAbaTt', letter) becomes string.find('BAbaTt', letter)
forget: letter, stored = '', nil  ⟶  '' becomes '?'
forget: if raw and token ~= '' and (tonumber(token) ~= stored or stored and not string.find(letters, letter)) then  ⟶  stored and not string.find(letters, letter) becomes not string.find(letters, letter)
""",
    "no key has the empty name, or one that is a part of a record": r"""
settle: elseif second then  ⟶  second becomes true
queue: local holder = pointer and string.find(pointer, '^%c') and redis.call('GET', string.sub(pointer, 8))  ⟶  pointer and string.find(pointer, '^%c') becomes pointer
queue: local holder = pointer and string.find(pointer, '^%c') and redis.call('GET', string.sub(pointer, 8))  ⟶  '^%c' becomes ''
""",
}

#: By name: the reason.
EQUIVALENT_MUTANTS = {
    name: reason for reason, names in _BY_REASON.items() for name in names.strip().splitlines()
}
