//! Metrics of generated text.
//!
//! BLEU (Papineni et al. 2002, <https://aclanthology.org/P02-1040>) as sacrebleu computes it by default (Post 2018,
//! <https://aclanthology.org/W18-6319>): tokenizer `13a`, case kept, n-grams of 1 to 4 tokens, one reference, smoothing
//! `exp`.

use std::{collections::HashMap, sync::LazyLock};

use regex::Regex;
use ruff_python_parser::parse_module;

/// Longest n-grams that are compared.
const MAX_ORDER: usize = 4;

/// What BLEU counts over texts and their references.
#[derive(Clone, Copy, Debug, Default)]
struct NgramCounts {
    /// n-grams of the texts that are in their reference, for each n.
    matching: [u64; MAX_ORDER],
    /// n-grams of the texts.
    all: [u64; MAX_ORDER],
    text_tokens: u64,
    reference_tokens: u64,
}

/// BLEU of texts, each with its reference, 0..100. Over all of them together: it is not the mean of each text's.
#[must_use]
pub fn bleu<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> f64 {
    let mut counts = NgramCounts::default();
    for (text, reference) in pairs {
        counts.add(&tokens(text), &tokens(reference));
    }
    counts.bleu()
}

impl NgramCounts {
    fn add(&mut self, text: &[String], reference: &[String]) {
        self.text_tokens += text.len() as u64;
        self.reference_tokens += reference.len() as u64;
        for order in 1..=MAX_ORDER {
            let mut expected: HashMap<&[String], u64> = HashMap::new();
            for ngram in reference.windows(order) {
                *expected.entry(ngram).or_default() += 1;
            }
            for ngram in text.windows(order) {
                self.all[order - 1] += 1;
                if let Some(left) = expected.get_mut(ngram).filter(|left| **left > 0) {
                    *left -= 1;
                    self.matching[order - 1] += 1;
                }
            }
        }
    }

    fn bleu(&self) -> f64 {
        // Without any match there is no score; without n-grams of a length their precision is 0.
        if self.matching.iter().all(|count| *count == 0) || self.all.contains(&0) {
            return 0.0;
        }
        let mut smoothing = 1.0;
        let mut logarithms = 0.0;
        for (matching, all) in self.matching.iter().zip(self.all) {
            let precision = match matching {
                0 => {
                    smoothing *= 2.0;
                    1.0 / (smoothing * all as f64)
                }
                count => *count as f64 / all as f64,
            };
            logarithms += precision.ln();
        }
        let brevity = match self.text_tokens < self.reference_tokens {
            true => (1.0 - self.reference_tokens as f64 / self.text_tokens as f64).exp(),
            false => 1.0,
        };
        100.0 * brevity * (logarithms / MAX_ORDER as f64).exp()
    }
}

/// The tokenizer `13a`, that of the NIST script `mteval-v13a.pl`.
fn tokens(text: &str) -> Vec<String> {
    static RULES: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| {
        let rules = [
            // Every punctuation mark but an apostrophe, a dot, a comma and a hyphen.
            (r"([\{-\~\[-` -\&\(-\+:-@/])", " $1 "),
            // Dots and commas, unless they stand between digits.
            (r"([^0-9])([\.,])", "$1 $2 "),
            (r"([\.,])([^0-9])", " $1 $2"),
            // A hyphen after a digit.
            (r"([0-9])(-)", "$1 $2 "),
        ];
        rules.into_iter().filter_map(|(rule, to)| Some((Regex::new(rule).ok()?, to))).collect()
    });
    let mut text = text.trim_end().replace("<skipped>", "").replace("-\n", "").replace('\n', " ");
    if text.contains('&') {
        for (entity, character) in [("&quot;", "\""), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">")]
        {
            text = text.replace(entity, character);
        }
    }
    let mut text = format!(" {text} ");
    for (rule, to) in RULES.iter() {
        text = rule.replace_all(&text, *to).into_owned();
    }
    text.split_whitespace().map(str::to_owned).collect()
}

/// Whether a text is Python: its first block of Markdown code or, without one, all of it, moved to the left margin. It
/// must have a statement and no syntax error, as `ast.parse` finds it.
#[must_use]
pub fn is_valid_python(text: &str) -> bool {
    static CODE_BLOCK: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new(r"(?s)```[a-zA-Z0-9]*\n(.*?)(?:```|\z)").ok());
    let block = CODE_BLOCK.as_ref().and_then(|block| block.captures(text)?.get(1));
    let code = at_left_margin(block.map_or(text, |block| block.as_str()));
    parse_module(&code).is_ok_and(|module| !module.syntax().body.is_empty())
}

/// A text without the indentation that all its lines have.
fn at_left_margin(text: &str) -> String {
    let indentation = |line: &str| line.len() - line.trim_start_matches([' ', '\t']).len();
    let lines = || text.lines().filter(|line| !line.trim().is_empty());
    let common = lines().map(indentation).min().unwrap_or_default();
    let rest = |line: &str| format!("{}\n", line.get(common..).unwrap_or_default());
    text.lines().map(rest).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bleu_is_that_of_sacrebleu() {
        // Of sacrebleu 2.6.0: corpus_bleu(texts, [references]).score
        let cases: [(f64, &[(&str, &str)]); 8] = [
            (100.0, &[("the cat sat on the mat.", "the cat sat on the mat.")]),
            (
                13.540_372_457_315_735,
                &[("the cat the cat on the mat", "the cat sat on a mat, quietly")],
            ),
            (
                72.001_504_659_959_05,
                &[
                    (
                        "def f(a, b):\n    return a+b  # 3.5, x-\ny",
                        "def f(a, b):\n    return a + b\n",
                    ),
                    (
                        "import os\nprint(os.path.join('a', \"b\"))",
                        "import os\nprint(os.path.join('a', 'b'))",
                    ),
                ],
            ),
            (
                84.648_172_489_061_44,
                &[(
                    "a &lt;b&gt; &quot;c&quot; 1-2 3,000.5 d-e",
                    "a < b > \"c\" 1 - 2 3,000.5 d-e f g",
                )],
            ),
            (0.0, &[("x y z", "x y z")]),
            (0.0, &[("nothing here at all matches", "other words are in this text")]),
            (0.0, &[("", "a b c d e")]),
            (
                22.957_488_466_614_336,
                &[("one two three four five six", "one two tree for five six")],
            ),
        ];
        for (expected, pairs) in cases {
            let found = bleu(pairs.iter().copied());
            assert!((found - expected).abs() < 1e-10, "{found} {pairs:?}");
        }
        assert_eq!(bleu([]), 0.0);
    }

    #[test]
    fn python_is_what_its_parser_accepts() {
        for valid in [
            "def f():\n  return 1\n",
            "match x:\n  case 1: pass\n",
            "f'{a!r:>{w}}'\n",
            "return 5",
            "    if a:\n        b()\n    return c",
            "Sure:\n```python\nx = 1\n```\nThat is it.",
            "```\nx = 1",
        ] {
            assert!(is_valid_python(valid), "{valid}");
        }
        for invalid in [
            "",
            " \n",
            "# nothing",
            "def f(:\n",
            "print 'a'\n",
            "def f():\nreturn 1\n",
            "x = [",
            "x = 08",
            "class A:\n\tx=1\n        y=2\n",
            "def f():\n    \"\"\"doc",
            "Sure, here it is:",
        ] {
            assert!(!is_valid_python(invalid), "{invalid}");
        }
        // A deep text must not overflow the stack.
        assert!(!is_valid_python(&"(".repeat(100_000)));
    }
}
