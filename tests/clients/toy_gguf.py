"""Writes a llama model with random weights and a tokenizer of its own: a real engine then runs in a second, and nothing is downloaded.

The tokenizer is byte-level BPE (every prompt can be encoded) with one token per common word. Rows of the output matrix are zero for every
token that is no word, so with the default sampling the model says only words, and never says its end token: a request runs to `max_tokens`.
"""

import sys

import gguf
import numpy as np

WORDS = """the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you were all her
she there would their we him been has when who will no more if out so up said what its about than into them can only other time new some could
these two may first then do any like my now over such our man me even most made after also did many off before must well back through years where
much your way down should because long each just state those people too mr how little good world make very year still see own work men day get
here old life both between being under three never know same last another while us might great go come since against right came take used himself
few house use place during high without again home around small however found part school""".split()

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_letters():
    """The printable letter that stands for each byte, as GPT-2's tokenizer has them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, spare = {}, 256
    for byte in range(256):
        if byte in printable:
            letters[byte] = chr(byte)
        else:
            letters[byte] = chr(spare)
            spare += 1
    return letters


def vocabulary():
    """Tokens, their types, merges, and the indices of the tokens the model may say."""
    tokens = list(byte_letters().values())
    known, merges, words = set(tokens), [], []
    for word in WORDS:
        letters = byte_letters()[ord(" ")] + word
        for end in range(2, len(letters) + 1):
            piece = letters[:end]
            if piece not in known:
                known.add(piece)
                tokens.append(piece)
                merges.append(f"{letters[:end - 1]} {letters[end - 1]}")
        words.append(tokens.index(letters))
    types = [gguf.TokenType.NORMAL] * len(tokens)
    for special in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        tokens.append(special)
        types.append(gguf.TokenType.CONTROL)
    return tokens, types, merges, words


def write(path, hidden=64, layers=2, context=8192, seed=7):
    tokens, types, merges, words = vocabulary()
    count, feed, heads = len(tokens), hidden * 2, hidden // 32
    random = np.random.default_rng(seed)

    def weights(*shape, scale=0.02):
        return random.normal(0, scale, shape).astype(np.float32)

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("toy")
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(feed)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(count)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)

    writer.add_tensor("token_embd.weight", weights(count, hidden, scale=1.0))
    for layer in range(layers):
        name = f"blk.{layer}."
        writer.add_tensor(name + "attn_norm.weight", np.ones(hidden, np.float32))
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            writer.add_tensor(f"{name}{part}.weight", weights(hidden, hidden))
        writer.add_tensor(name + "ffn_norm.weight", np.ones(hidden, np.float32))
        writer.add_tensor(name + "ffn_gate.weight", weights(feed, hidden))
        writer.add_tensor(name + "ffn_up.weight", weights(feed, hidden))
        writer.add_tensor(name + "ffn_down.weight", weights(hidden, feed))
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    output = np.zeros((count, hidden), np.float32)
    output[words] = weights(len(words), hidden, scale=0.5)
    writer.add_tensor("output.weight", output)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write(sys.argv[1], *map(int, sys.argv[2:]))
