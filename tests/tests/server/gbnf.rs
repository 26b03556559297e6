//! Grammars of llama.cpp (GBNF): texts that they have, and texts that they have not.

use fracbit_grammar::{Rule, Vocabulary};
use fracbit_io::{Bos, EncodeOptions, PrefixSpace};
use fracbit_model::Constraint;
use serde_json::json;

use crate::client::{COMPLETIONS, ask, model, options, serve, tokenizer};

/// The shape of llama.cpp's `json.gbnf`.
const JSON: &str = r##"
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws # any of them
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"##;

/// The shape of its `arithmetic.gbnf`: what follows a number may be what spaces hold.
const ARITHMETIC: &str = r##"
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"##;

/// Whether a grammar has a text: each of its tokens may come, and then an end.
fn has(vocabulary: &Vocabulary, grammar: &str, text: &str) -> bool {
    let tokenizer = tokenizer(None);
    let rule = Rule::Gbnf(grammar.to_owned());
    let mut grammar = vocabulary.grammar(&rule).unwrap_or_else(|e| panic!("{grammar}: {e}"));
    let encode = EncodeOptions { bos: Bos::Never, prefix_space: PrefixSpace::Drop };
    let tokens = tokenizer.encode(text, encode).expect("a text");
    assert_eq!(tokenizer.decode(&tokens, false).expect("its tokens"), text);
    let may = |grammar: &mut fracbit_grammar::Grammar, token: u32| {
        let mut logits = vec![0.0; model().config().vocab_size];
        grammar.mask(&mut logits).expect("a grammar that is no work");
        logits[token as usize] == 0.0
    };
    for token in tokens {
        if grammar.complete() || !may(&mut grammar, token) {
            return false;
        }
        grammar.push(token).expect("a token that may come");
    }
    grammar.complete() || tokenizer.eos_ids().iter().any(|&end| may(&mut grammar, end))
}

#[test]
fn grammars_have_their_texts_and_no_others() {
    let tokenizer = tokenizer(None);
    let vocabulary = Vocabulary::new(&tokenizer, model().config().vocab_size, tokenizer.eos_ids());
    let vocabulary = vocabulary.expect("a vocabulary with an end");
    let list = "root ::= item+\n\n# one on each line\nitem ::= \"- \" [^\\r\\n\\x0b\\x0c]+ \"\\n\"";
    // Left to the longest match, the second would be cut where it has no rest.
    let short = "root ::= (\"a\" \"b\" \"c\" | \"ab\" \"d\") tail\ntail ::= \"!\" tail?";
    let same = "root ::= (\"a\" | [a-z] \"b\") root?";
    let nested = "root ::= \"(\" root? \")\" | [0-9]{2,3}";
    let left = "root ::= root \"+\" digit | digit\ndigit ::= [0-9]";
    let escapes = "root ::= \"\\u0041\\x42\\U00000043\\t\" [\\u00e0-\\u00ff\\]\\-^] .";
    let times = "root ::= \"a\"{2} \"b\"{1,} (\"c\" | \"d\"){0,2} \"e\"?";
    let trailing = "root ::= \"yes\" |\n  \"no\" |\n  other-one\nother-one ::= \"\" \"perhaps\"";
    for (grammar, good, bad) in [
        (
            JSON,
            &[
                "{}",
                "{\"a\": 1}",
                "{\"a\":[true, null,-12.5e+3],\n \"b\": {\"c\": \"d\\n\\u00e9 x\"}}",
                "{\"a\": []} ",
            ][..],
            &["", "[]", "{\"a\": 01}", "{\"a\" 1}", "{\"a\": tru}", "{\"a\": 1,}", "{\"a\": \"\n\"}", "{}}"]
                [..],
        ),
        (
            ARITHMETIC,
            &["a=1\n", "a +b *(3-c_1) = 42\n", "1=1\n2 = 2\n\n", "x\n= y \n\n", "((1))=1\t\n"],
            &["a=1", "=1\n", "a=\n", "(a=1\n", "A=1\n", "a+=1\n"],
        ),
        (list, &["- a\n", "- a b\n- c\n"], &["", "- \n", "- a", "a\n", "- a\n\n"]),
        (short, &["abc!", "abd!!"], &["ab!", "abcd!", "abc"]),
        (same, &["a", "ab", "bb", "aab", "abab", "aa"], &["b", "ba", "abc", ""]),
        (nested, &["12", "(123)", "((45))", "()", "(())"], &["1", "1234", "(12", "12)", ""]),
        (left, &["1", "1+2+3"], &["", "+1", "1+", "12"]),
        (escapes, &["ABC\t\u{e9}x", "ABC\t]\u{20ac}", "ABC\t-\n", "ABC\t^^"], &["ABC\t", "ABC\taa", "ABCx"]),
        (times, &["aab", "aabbbcd", "aabe", "aabdde"], &["ab", "aa", "aabcdc", "aaab", "aabee"]),
        (trailing, &["yes", "no", "perhaps"], &["", "yesno", "maybe"]),
    ] {
        for text in good {
            assert!(has(&vocabulary, grammar, text), "{grammar}\nhas {text:?}");
        }
        for text in bad {
            assert!(!has(&vocabulary, grammar, text), "{grammar}\nhas no {text:?}");
        }
    }
}

#[test]
fn what_is_no_grammar_is_told_where() {
    let tokenizer = tokenizer(None);
    let vocabulary = Vocabulary::new(&tokenizer, model().config().vocab_size, tokenizer.eos_ids());
    let vocabulary = vocabulary.expect("a vocabulary with an end");
    for (grammar, words) in [
        ("start ::= \"a\"", "`root`"),
        ("root ::= other", "`other` should be defined"),
        ("root ::= \"a\"\nroot ::= \"b\"", "line 2"),
        ("root = \"a\"", "`::=`"),
        ("root ::= \"a", "end with `\"`"),
        ("root ::= [a", "end with `]`"),
        ("root ::= [z-a]", "should rise"),
        ("root ::= (\"a\"", "end with `)`"),
        ("root ::= \"a\"{3,2}", "at most n"),
        ("root ::= \"a\"{3000}", "2000"),
        ("root ::= \"\\q\"", "escape"),
        ("root ::= \"\\uD800\"", "hexadecimal"),
        ("root ::= <think>", "tokens"),
        ("root ::= \"a\" )", "end with its line"),
        ("root ::= root \"a\"", "fits"),
    ] {
        let refused = vocabulary.grammar(&Rule::Gbnf(grammar.to_owned())).map(drop);
        let said = refused.expect_err(grammar).to_string();
        assert!(said.contains(words), "{grammar}: {said}");
    }
}

#[test]
fn requests_may_bring_one() {
    let serving = serve(options(), tokenizer(None));
    for field in ["grammar", "guided_grammar"] {
        let grammar = "root ::= (\"red\" | \"blue\") \" \" [0-9]{2} \"!\"";
        let body = json!({ "prompt": "The ball is", "max_tokens": 40, "seed": 3, field: grammar });
        let answer = ask(serving.address, COMPLETIONS, "", &body);
        assert_eq!(answer.status, 200, "{answer:?}");
        let answer = answer.json();
        let text = answer["choices"][0]["text"].as_str().expect("a text");
        let digits = text.strip_prefix("red ").or_else(|| text.strip_prefix("blue "));
        let digits = digits.and_then(|rest| rest.strip_suffix('!')).unwrap_or_else(|| panic!("{answer}"));
        assert!(digits.len() == 2 && digits.bytes().all(|b| b.is_ascii_digit()), "{text}");
    }
    let body = json!({ "prompt": "a", "grammar": "root ::= [a" });
    let refused = ask(serving.address, COMPLETIONS, "", &body);
    assert!(refused.status == 400 && refused.json()["error"]["param"] == "grammar", "{refused:?}");
}
