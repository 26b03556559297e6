"""Small tokenizers in the forms that models come with, and what transformers and SentencePiece make of hostile texts. Writes into tokenizers/.

pip install transformers sentencepiece protobuf tiktoken; python3 other_tokenizers.py
"""
import base64
import json
import os
import random

HERE = os.path.dirname(os.path.abspath(__file__))
OUT = os.path.join(HERE, "tokenizers")
TEXTS = [
    "", " ", "  ", "a", " a", "a ", "the cat", "the  cat  sat", "\n", "a\nb", "\n\n a \t b\r\n", "It's 2024, isn't it? I'LL go.", "don't", "123 4567 89",
    "é", "naïve café", "e\u0301", "日本語 テスト", "🦀 crab 👩‍👩‍👧", "\u200b\ufeff", "<s>", "a</s>b", "<|im_end|>", "x <|im_end|> y", "▁", "▁▁a", "a▁b", "\x00\x01", "...!!!", "foo_bar(baz[1])",
    "    indented", "trailing   ", "tab\there", "MiXeD CaSe", "<unk>", "[INST] hi [/INST]", "a" * 50, "\u00a0nbsp", "1+1=2", "ﬁ ﬂ", "Ⅷ", "٣", "ñ", "\U0001F600\U0001F601",
]


def corpus():
    rng = random.Random(1)
    words = "the a cat dog sat on mat and then it was happy because of rain sun house tree little big ran saw said that he she they is not don't 12 34 2024 naïve café".split()
    return [" ".join(rng.choice(words) for _ in range(12)) + rng.choice([".", "!", "?"]) for _ in range(400)]


def write(name, files, cases):
    where = os.path.join(OUT, name)
    os.makedirs(where, exist_ok=True)
    for file, content in files.items():
        mode = "wb" if isinstance(content, bytes) else "w"
        with open(os.path.join(where, file), mode) as f:
            f.write(content)
    with open(os.path.join(where, "cases.json"), "w", encoding="utf-8") as f:
        json.dump(cases, f, ensure_ascii=True, indent=0)
        f.write("\n")


def of_transformers(name, files, special=False):
    from transformers import AutoTokenizer

    write(name, files, [])
    tokenizer = AutoTokenizer.from_pretrained(os.path.join(OUT, name))
    write(name, {}, [[text, tokenizer.encode(text, add_special_tokens=special)] for text in TEXTS])


def sentencepiece_model(**more):
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()), model_writer=model, byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
        normalization_rule_name="identity", **more)
    return model.getvalue()


def of_sentencepiece(name, model, config):
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    # A text that spells a control piece is one to SentencePiece as any other; added tokens are transformers' own.
    texts = [t for t in TEXTS if not any(c in t for c in ("<s>", "</s>", "<unk>")) and not (t == "▁" and name == "spm-spaces")]
    write(name, {"tokenizer.model": model, "tokenizer_config.json": json.dumps(config)}, [[t, processor.encode(t)] for t in texts])


def ranks():
    """Byte strings by rank: all bytes, then pairs that are frequent."""
    known = {bytes([b]): b for b in range(256)}
    words = [[bytes([b]) for b in w.encode()] for line in corpus() for w in [(" " + x) for x in line.split()]]
    while len(known) < 400:
        count = {}
        for word in words:
            for pair in zip(word, word[1:]):
                count[pair] = count.get(pair, 0) + 1
        best = max(count, key=lambda p: (count[p], p))
        known[best[0] + best[1]] = len(known)
        for word in words:
            i = 0
            while i + 1 < len(word):
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = [best[0] + best[1]]
                i += 1
    return known


def byte_alphabet():
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    out, moved = {}, 0
    for b in range(256):
        out[b] = chr(b if b in plain else 256 + moved)
        moved += b not in plain
    return out


def main():
    llama = {"tokenizer_class": "LlamaTokenizer", "legacy": True, "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    of_sentencepiece("spm-llama", sentencepiece_model(model_type="bpe", vocab_size=420, remove_extra_whitespaces=False), llama)
    # A space before the first piece of a text only, and none where there is one: transformers' own way.
    of_transformers("spm-first", {"tokenizer.model": sentencepiece_model(model_type="bpe", vocab_size=420, remove_extra_whitespaces=False), "tokenizer_config.json": json.dumps({**llama, "legacy": False})})
    of_sentencepiece("spm-spaces", sentencepiece_model(model_type="bpe", vocab_size=420, remove_extra_whitespaces=True), llama)
    of_sentencepiece("spm-gemma", sentencepiece_model(model_type="bpe", vocab_size=420, add_dummy_prefix=False, remove_extra_whitespaces=False, user_defined_symbols=["\n\n", "▁▁", "happy", "[x"]), {**llama, "tokenizer_class": "GemmaTokenizer"})
    of_sentencepiece("spm-unigram", sentencepiece_model(model_type="unigram", vocab_size=420, remove_extra_whitespaces=False), llama)
    known = ranks()
    lines = "".join(f"{base64.b64encode(t).decode()} {r}\n" for t, r in known.items())
    decoder = {str(400 + i): {"content": c, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True} for i, c in [(0, "<|endoftext|>"), (3, "<|im_end|>")]}
    of_transformers("tiktoken", {"tokenizer.model": lines, "tokenizer_config.json": json.dumps({"tokenizer_class": "TokenizersBackend", "added_tokens_decoder": decoder, "eos_token": "<|im_end|>"})})
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tekken = {"config": {"pattern": pattern, "num_vocab_tokens": 400, "default_vocab_size": 410, "default_num_special_tokens": 10, "version": "v7"},
              "vocab": [{"rank": r, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for t, r in known.items()],
              "special_tokens": [{"rank": i, "token_str": s, "is_control": True} for i, s in enumerate(["<unk>", "<s>", "</s>", "[INST]", "[/INST]"])]}
    of_transformers("tekken", {"tekken.json": json.dumps(tekken), "tokenizer_config.json": json.dumps({"tokenizer_class": "TokenizersBackend", "bos_token": "<s>", "eos_token": "</s>"})})
    letters = byte_alphabet()
    spell = lambda b: "".join(letters[x] for x in b)
    vocab = {spell(t): r for t, r in known.items()}
    merges = []
    for token in known:
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:
            best = min(range(len(parts) - 1), key=lambda i: known.get(parts[i] + parts[i + 1], 1 << 30))
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2:
            merges.append(f"{spell(parts[0])} {spell(parts[1])}")
    for name, cls in [("gpt2", "GPT2Tokenizer"), ("qwen2", "Qwen2Tokenizer")]:
        more = {"<|endoftext|>": 400, "<|im_end|>": 401}
        config = {"tokenizer_class": cls, "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "bos_token": None}
        files = {"vocab.json": json.dumps({**vocab, **(more if name == "gpt2" else {})}), "merges.txt": "#version: 0.2\n" + "\n".join(merges) + "\n", "tokenizer_config.json": json.dumps(config)}
        if name == "qwen2":
            files["added_tokens.json"] = json.dumps(more)
        of_transformers(name, files)


if __name__ == "__main__":
    main()
