"""Tiny tokenizers of exactly the wanted size: byte-pair merges learnt from the paragraph below, in the two styles in use.

`bytes`: byte-level alphabet (Llama 3, Qwen, SmolLM). Below 256 + specials entries the alphabet holds printable ASCII, space and
newline only; the tokenizer then drops other bytes silently, which is enough here.
`pieces`: characters after replacing spaces by U+2581 (Llama 1/2, Mistral), unknown characters to <unk>, BOS put in front.
"""

import collections

TEXT = """the miller had three sons and a small mill by the river. when the water was low the wheel stood still, and the
eldest son said that they should sell the stones. the second son said that they should wait for the rain. the third said
nothing, went up the river with a spade and a lamp, and came back in the morning with wet shoes. after that the wheel turned
all the year, and nobody asked him where the water came from. "there was a stone in the way," he told his own children later,
"and then there was not." """


def byte_alphabet():
    """The printable stand-in of each byte, as byte-level tokenizers use it: printable Latin-1 stays, the rest moves to U+0100.."""
    keep = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in keep]
    return {b: chr(b) if b in keep else chr(256 + moved.index(b)) for b in range(256)}


def learn_merges(words, count):
    """The `count` most frequent pair merges; ties go to the smaller pair, so that the result is one."""
    words = {tuple(w): n for w, n in collections.Counter(words).items()}
    merges = []
    for _ in range(count):
        pairs = collections.Counter()
        for word, n in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] += n
        best = min(pairs, key=lambda p: (-pairs[p], p))
        merges.append(best)
        joined = {}
        for word, n in words.items():
            out, i = [], 0
            while i < len(word):
                if word[i : i + 2] == best:
                    out.append(word[i] + word[i + 1])
                    i += 2
                else:
                    out.append(word[i])
                    i += 1
            joined[tuple(out)] = joined.get(tuple(out), 0) + n
        words = joined
    return merges


def tokenizer(style, size, specials, bos):
    """tokenizer.json as a dictionary: `size` entries, `specials` first; `bos` names the special put in front, or None."""
    if style == "bytes":
        mapped = byte_alphabet()
        full = size >= len(specials) + 256
        alphabet = [mapped[b] for b in (range(256) if full else [10, *range(0x20, 0x7F)])]
        words = [("" if i == 0 else mapped[0x20]) + w for i, w in enumerate(TEXT.split())]
    else:
        alphabet = ["\u2581", "\n", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?'\"-:;()"]
        words = ["\u2581" + w for w in TEXT.split()]
    merges = learn_merges(words, size - len(specials) - len(alphabet))
    entries = [*specials, *alphabet, *(a + b for a, b in merges)]
    assert len(entries) == len(set(entries)) == size, (len(entries), len(set(entries)), size)

    added = [
        {"id": i, "content": s, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for i, s in enumerate(specials)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    template = None
    if bos is not None:
        first, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
        template = {
            "type": "TemplateProcessing",
            "single": [first, text],
            "pair": [first, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [specials.index(bos)], "tokens": [bos]}},
        }
    to_piece = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    to_space = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    pieces = style == "pieces"
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, to_piece]} if pieces else None,
        "pre_tokenizer": None if pieces else byte_level,
        "post_processor": template,
        "decoder": {"type": "Sequence", "decoders": [to_space, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
        if pieces
        else byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>" if pieces else None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": pieces,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {e: i for i, e in enumerate(entries)},
            "merges": [list(m) for m in merges],
        },
    }
