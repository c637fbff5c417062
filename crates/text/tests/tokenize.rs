//! Files of JSON lines become files of tokens.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

mod kit;

use std::{
    collections::BTreeSet,
    fs,
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

use baton_data::{Beton, NO_LABEL};
use baton_text::{
    Error, LossTokens, OnBadLine, TemplateSource, TextFormat, TokenFile, TokenizeEvent,
    TokenizeOptions, TokenizedText, Tokenizer, ValSet, tokenize,
};
use kit::Model;
use serde_json::json;

/// A model and a folder for data.
struct Case {
    model: Model,
    options: TokenizeOptions,
    events: Vec<String>,
}

impl Case {
    /// With the lines of `train.jsonl`.
    fn new(lines: &str) -> Self {
        let model = Model::chatml();
        let options = TokenizeOptions {
            from: vec![model.write("train.jsonl", lines)],
            to: model.folder().join("train.beton"),
            val: None,
            format: None,
            template: TemplateSource::Model,
            loss: LossTokens::Completions,
            sequence: 64,
            on_bad: OnBadLine::Fail,
            threads: NonZeroUsize::new(2).unwrap(),
        };
        Self { model, options, events: Vec::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.model.folder().join(name)
    }

    fn run(&mut self) -> Result<TokenizedText, Error> {
        let tokenizer = Tokenizer::load(self.model.folder()).unwrap();
        tokenize(&tokenizer, &self.options, &mut |event| match event {
            TokenizeEvent::Counted { lines } => self.events.push(format!("counted {lines}")),
            TokenizeEvent::Encoded { lines } => self.events.push(format!("encoded {lines}")),
            TokenizeEvent::Skipped(error) => self.events.push(format!("skipped {error}")),
        })
    }

    /// The error, without the folder.
    fn refused(&mut self) -> String {
        let error = self.run().unwrap_err().to_string();
        assert!(!self.path("train.beton").exists(), "nothing is written");
        error.replace(&format!("{}/", self.model.folder().display()), "")
    }

    /// The samples of a file as text.
    fn texts(&self, name: &str) -> Vec<String> {
        let tokenizer = Tokenizer::load(self.model.folder()).unwrap();
        let file = TokenFile::open(self.path(name)).unwrap();
        let text = |sample| tokenizer.decode(&file.sample(sample).unwrap().tokens).unwrap();
        (0..file.beton().len()).map(text).collect()
    }
}

fn texts(range: std::ops::Range<usize>) -> String {
    range
        .map(|number| format!("{{\"text\": \"hi {number}\", \"module\": {}}}\n", number / 10))
        .collect()
}

#[test]
fn the_fields_of_a_file_are_tokens_labels_and_their_numbers() {
    let mut case = Case::new(
        "{\"prompt\": \"hi\", \"completion\": \" yo\"}\n{\"prompt\": \"a\", \"completion\": \"b\"}\n",
    );
    case.options.template = TemplateSource::Nothing;
    let tokenized = case.run().unwrap();
    let [hi, yo, space, eos] = ["hi", "yo", "Ġ", "</s>"].map(|token| case.model.id(token));

    let beton = Beton::open(&case.options.to).unwrap();
    let names: Vec<(&str, &str)> =
        beton.fields().iter().map(|field| (field.name.as_str(), field.kind.name())).collect();
    let expected = [
        ("tokens", "BytesField"),
        ("labels", "BytesField"),
        ("predicted", "IntField"),
        ("largest", "IntField"),
    ];
    assert_eq!(names, expected);
    let mut buffer = Vec::new();
    let mut words = |field: &str| {
        let column = beton.bytes_column(field).unwrap();
        let (words, rest) = beton.bytes(&column, 0, &mut buffer).unwrap().as_chunks::<4>();
        assert!(rest.is_empty());
        words.to_vec()
    };
    let tokens = words("tokens").into_iter().map(u32::from_le_bytes).collect::<Vec<_>>();
    assert_eq!(tokens, [hi, space, yo, eos]);
    let labels = words("labels").into_iter().map(i32::from_le_bytes).collect::<Vec<_>>();
    assert_eq!(labels, [NO_LABEL, space as i32, yo as i32, eos as i32]);
    let int = |field: &str| beton.int(&beton.int_column(field).unwrap(), 0).unwrap();
    assert_eq!((int("predicted"), int("largest")), (3, eos.into()));

    let size = tokenized.train;
    assert_eq!((size.samples, size.tokens, size.predicted, size.largest), (2, 7, 5, eos));
    assert_eq!(
        (size.path.as_path(), size.bytes),
        (Path::new(&case.options.to), beton.file_bytes())
    );
    assert_eq!(tokenized.formats, [TextFormat::PromptCompletion]);
    assert_eq!(case.events, ["counted 2", "encoded 2"]);
}

#[test]
fn the_same_input_gives_the_same_bytes_with_any_number_of_threads() {
    let mut case = Case::new(&texts(0..5_000));
    let mut written = |threads: usize| {
        case.options.threads = NonZeroUsize::new(threads).unwrap();
        case.run().unwrap();
        fs::read(&case.options.to).unwrap()
    };
    let first = written(1);
    assert!(first == written(1) && first == written(3));
    assert_eq!(case.texts("train.beton")[4_999], "hi 4999</s>");
}

#[test]
fn several_files_of_several_formats_are_one_data_set() {
    let mut case = Case::new("{\"text\": \"one\"}\n\n{\"text\": \"two\"}");
    let more =
        r#"{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}"#;
    case.options.from.push(case.model.write("more.jsonl", more));
    let tokenized = case.run().unwrap();
    assert_eq!(tokenized.formats, [TextFormat::Text, TextFormat::ShareGpt]);
    assert_eq!(tokenized.template, Some(case.path("tokenizer_config.json")));
    let chat = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n";
    assert_eq!(case.texts("train.beton"), ["one</s>", "two</s>", chat]);
}

#[test]
fn a_template_of_ones_own_replaces_the_models() {
    let mut case = Case::new(r#"{"prompt": "hi", "completion": "yo"}"#);
    let mine = "{% for m in messages %}{{ m.role[0] ~ ':' ~ m.content ~ eos_token }}{% endfor %}\
                {% if add_generation_prompt %}a:{% endif %}";
    case.options.template = TemplateSource::File(case.model.write("mine.jinja", mine));
    case.run().unwrap();
    assert_eq!(case.texts("train.beton"), ["u:hi</s>a:yo</s>"]);
    case.options.template = TemplateSource::File(case.path("no.jinja"));
    fs::remove_file(&case.options.to).unwrap();
    assert!(case.refused().starts_with("cannot read no.jinja: No such file"));
}

#[test]
fn an_end_of_messages_that_the_models_files_do_not_name_is_reported() {
    let mut case = Case::new(&texts(0..3));
    assert_eq!(case.run().unwrap().unknown_end, None, "a text ends with eos");
    let chat = r#"{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}]}"#;
    let mut case = Case::new(&format!("{chat}\n"));
    assert_eq!(case.run().unwrap().unknown_end.as_deref(), Some("<|im_end|>"));
    let ends = json!({"eos_token_id": [case.model.id("</s>"), case.model.id("<|im_end|>")]});
    case.model.write("generation_config.json", &ends.to_string());
    assert_eq!(case.run().unwrap().unknown_end, None);
}

#[test]
fn a_special_token_before_a_short_reply_does_not_end_it() {
    let mut case = Case::new(r#"{"prompt": "hi", "completion": "yo"}"#);
    let mine = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}\
                {% if add_generation_prompt %}<|im_start|>{% endif %}";
    case.options.template = TemplateSource::File(case.model.write("mine.jinja", mine));
    assert_eq!(case.run().unwrap().unknown_end, None);
    assert_eq!(case.texts("train.beton"), ["<|im_start|>hi<|im_start|>yo"]);
}

#[test]
fn long_samples_are_cut_and_counted() {
    let long = format!("{{\"text\": \"{}\"}}\n", "xy".repeat(50));
    let mut case = Case::new(&format!("{{\"text\": \"xyz\"}}\n{long}{long}"));
    let size = case.run().unwrap().train;
    assert_eq!((size.samples, size.truncated, size.tokens_cut), (3, 2, 2 * (101 - 64)));
    assert_eq!((size.tokens, size.longest), (4 + 2 * 64, 101));
    let lengths: Vec<(u32, u64)> =
        size.lengths.iter().map(|bin| (bin.up_to, bin.samples)).collect();
    assert_eq!(lengths, [(16, 1), (32, 0), (64, 2)]);
    assert_eq!(case.texts("train.beton")[1], "xy".repeat(32));
}

#[test]
fn a_bad_line_ends_the_run_with_its_position() {
    let good = "{\"prompt\": \"hi\", \"completion\": \"yo\"}\n";
    let long = format!("{{\"prompt\": \"{}\", \"completion\": \"yo\"}}", "xy".repeat(50));
    for (bad, expected) in [
        (
            r#"{"prompt": "hi", "completion": 3}"#,
            ", column 32: invalid type: integer `3`, expected a string",
        ),
        (r#"{"prompt": "hi""#, ", column 15: EOF while parsing an object"),
        (r#"{"prompt": "hi", "completion": ""}"#, ": the completion is empty"),
        (
            r#"{"text": "hi"}"#,
            ": has \"text\", but this file is read as lines with \"prompt\" and \"completion\"",
        ),
        (long.as_str(), ": nothing to learn is left of its "),
    ] {
        let error = Case::new(&format!("{good}\n{bad}\n{good}")).refused();
        assert!(error.starts_with(&format!("train.jsonl, line 3{expected}")), "{error}");
    }
    let mut case = Case::new("{\"question\": 1}");
    assert!(
        case.refused()
            .starts_with("train.jsonl, line 1: the keys (\"question\") are of no known format")
    );
    case.options.format = Some(TextFormat::Text);
    let expected =
        "train.jsonl, line 1: has the keys (\"question\"), but a line of this file needs \"text\"";
    assert_eq!(case.refused(), expected);
}

#[test]
fn a_conversation_that_the_template_refuses_is_reported_with_both_positions() {
    let mut case = Case::new(
        r#"{"messages": [{"role": "system", "content": "x"}, {"role": "assistant", "content": "y"}]}"#,
    );
    case.model.config(&json!({"chat_template":
        "\n{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"}));
    let expected = "train.jsonl, line 1: chat template tokenizer_config.json, line 2: it refuses the conversation: System \
                    role not supported";
    assert_eq!(case.refused(), expected);
}

#[test]
fn bad_lines_can_be_skipped_and_are_reported() {
    let mut case =
        Case::new("{\"text\": \"a\"}\n{\"text\": \"\"}\n{\"text\": 3}\n{\"text\": \"b\"}\n");
    case.options.on_bad = OnBadLine::Skip;
    let tokenized = case.run().unwrap();
    assert_eq!((tokenized.skipped, tokenized.train.samples), (2, 2));
    assert_eq!(case.texts("train.beton"), ["a</s>", "b</s>"]);
    assert!(
        case.events[1]
            .ends_with("train.jsonl, line 2: the text is empty, so there is nothing to learn")
    );
    assert!(case.events[2].contains("train.jsonl, line 3, column 10: "), "{:?}", case.events);

    let mut case = Case::new("{\"text\": \"\"}\n");
    case.options.on_bad = OnBadLine::Skip;
    let error = case.refused();
    let expected = "train.beton would have no samples: lines were skipped, the first one because of: train.jsonl, line 1: \
                    the text is empty, so there is nothing to learn";
    assert_eq!(error, expected);
}

#[test]
fn a_line_that_is_not_text_can_be_skipped() {
    let mut case = Case::new("");
    let lines = b"{\"text\": \"a\"}\n\xff\n{\"text\": \"b\"}\n";
    fs::write(case.path("train.jsonl"), lines).unwrap();
    assert!(case.refused().starts_with("train.jsonl, line 2: byte 1 is not UTF-8"));
    case.options.on_bad = OnBadLine::Skip;
    let tokenized = case.run().unwrap();
    assert_eq!((tokenized.skipped, tokenized.train.samples), (1, 2));
    assert_eq!(case.texts("train.beton"), ["a</s>", "b</s>"]);
}

#[test]
fn a_bad_first_line_can_be_skipped_and_the_next_one_has_the_format() {
    let mut case = Case::new("not JSON\n{\"id\": 3}\n{\"text\": \"b\"}\n");
    assert!(case.refused().starts_with("train.jsonl, line 1, column 2: "));
    case.options.on_bad = OnBadLine::Skip;
    let tokenized = case.run().unwrap();
    assert_eq!((tokenized.skipped, tokenized.formats), (2, vec![TextFormat::Text]));
    assert_eq!(case.texts("train.beton"), ["b</s>"]);

    let mut case = Case::new("not JSON\n{\"id\": 3}\n");
    case.options.on_bad = OnBadLine::Skip;
    assert!(case.refused().starts_with("train.jsonl, line 1, column 2: "));
}

#[test]
fn no_key_is_in_both_sets_and_the_order_of_lines_does_not_matter() {
    let mut case = Case::new(&texts(0..500));
    case.options.val =
        Some(ValSet { to: case.path("val.beton"), share: 0.3, by: Some("module".to_owned()) });
    let tokenized = case.run().unwrap();
    let val_size = tokenized.val.unwrap();
    assert_eq!(tokenized.train.samples + val_size.samples, 500);
    assert!(
        (50..250).contains(&val_size.samples) && val_size.samples.is_multiple_of(10),
        "{val_size:?}"
    );
    let [train, val] = ["train.beton", "val.beton"].map(|name| modules(&case.texts(name)));
    assert!(train.is_disjoint(&val) && train.len() + val.len() == 50);

    let lines: Vec<String> = texts(0..500).lines().rev().map(ToOwned::to_owned).collect();
    case.model.write("train.jsonl", &lines.join("\n"));
    case.run().unwrap();
    assert_eq!(modules(&case.texts("val.beton")), val);
}

/// Modules of the samples that `texts` made.
fn modules(texts: &[String]) -> BTreeSet<u64> {
    texts
        .iter()
        .map(|text| text[3..].strip_suffix("</s>").unwrap().parse::<u64>().unwrap() / 10)
        .collect()
}

#[test]
fn a_set_without_samples_and_a_line_without_the_key_are_refused() {
    let mut case = Case::new(
        "{\"text\": \"a\", \"module\": 1}\n{\"text\": \"b\", \"module\": 1}\n{\"text\": \"c\"}\n",
    );
    let val = ValSet { to: case.path("val.beton"), share: 0.5, by: Some("module".to_owned()) };
    case.options.val = Some(val.clone());
    assert!(case.refused().starts_with("train.jsonl, line 3: has no \"module\", which decides"));
    case.options.on_bad = OnBadLine::Skip;
    let error = case.refused();
    assert!(error.contains("beton would have no samples: "), "{error}");
    case.model.write("train.jsonl", "{\"text\": \"a\", \"module\": 1}\n");
    assert!(case.refused().ends_with(
        "would have no samples: change --val-share, or --by if there are only a few values"
    ));
}

#[test]
fn options_that_would_lose_data_are_refused() {
    let mut case = Case::new("{\"text\": \"a\"}\n");
    for sequence in [0, 1, 300_000] {
        case.options.sequence = sequence;
        assert_eq!(case.refused(), format!("--sequence {sequence}: must be 2 to 262144 tokens"));
    }
    case.options.sequence = 64;
    let (to, from) = (case.options.to.clone(), case.path("./train.jsonl"));
    case.options.to = from;
    let error = case.run().unwrap_err().to_string();
    assert!(
        error.ends_with("train.jsonl is read, so it cannot be written: give another file"),
        "{error}"
    );
    case.options.to = to.clone();
    case.options.val = Some(ValSet { to, share: 0.5, by: None });
    assert!(case.refused().contains("is to be both training and validation set"));
    case.options.val = Some(ValSet { to: case.path("val.beton"), share: 1.0, by: None });
    assert_eq!(case.refused(), "--val-share 1: must be above 0 and below 1");
    case.options.val = None;
    case.model.write("train.jsonl", "\n \n");
    assert_eq!(case.refused(), "train.jsonl: has no lines: it must have one JSON object per line");
}

#[test]
fn a_model_without_a_chat_template_is_refused_before_anything_is_written() {
    let mut case = Case::new(r#"{"messages": [{"role": "assistant", "content": "y"}]}"#);
    case.model.config(&json!({"eos_token": "</s>"}));
    let error = case.refused();
    assert!(
        error.contains("has no chat template") && error.ends_with("give one with --template FILE"),
        "{error}"
    );
}

#[test]
fn files_of_other_fields_are_not_shown_as_text() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/digits/digits-val.beton");
    let error = TokenFile::open(path).unwrap_err().to_string();
    assert!(error.contains("tokens"), "{error}");
}
