"""K3's chat protocol: tokenizer, prompt encoder, output parser and grammars, without torch or SGLang."""
