//! Lines of JSON → samples, in one of five formats.
//!
//! | format | keys of a line |
//! |---|---|
//! | messages | `messages`: a list of `{"role", "content"}`; optional `tools` |
//! | ShareGPT | `conversations`: a list of `{"from", "value"}`, from `human`, `gpt` or `system` |
//! | prompt and completion | `prompt`, `completion` |
//! | Alpaca | `instruction`, `output`; optional `input` |
//! | text | `text` |
//!
//! Other keys are ignored. If a line has the keys of several formats, it is the first of them in this table.

use std::{
    collections::BTreeSet,
    fmt,
    fs::File,
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
};

use minijinja::Value;
use serde::{
    Deserialize, Deserializer,
    de::{self, DeserializeOwned, IgnoredAny, MapAccess, Visitor},
};

use crate::{Error, chat::value_of};

/// Longest line in bytes: a limit of memory.
const MAX_JSON_BYTES: u64 = 64 << 20;

/// How a line of JSON describes a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextFormat {
    /// A conversation, as OpenAI's API has it.
    Messages,
    /// A conversation, as ShareGPT has it.
    ShareGpt,
    /// A prompt and its completion.
    PromptCompletion,
    /// An instruction with an optional input, and its output.
    Alpaca,
    /// Plain text.
    Text,
}

impl TextFormat {
    /// All formats; earlier ones win.
    pub const ALL: [Self; 5] =
        [Self::Messages, Self::ShareGpt, Self::PromptCompletion, Self::Alpaca, Self::Text];

    /// Keys that every line has.
    #[must_use]
    pub fn keys(self) -> &'static [&'static str] {
        match self {
            Self::Messages => &["messages"],
            Self::ShareGpt => &["conversations"],
            Self::PromptCompletion => &["prompt", "completion"],
            Self::Alpaca => &["instruction", "output"],
            Self::Text => &["text"],
        }
    }

    fn of(keys: &BTreeSet<String>) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.is_in(keys))
    }

    fn is_in(self, keys: &BTreeSet<String>) -> bool {
        self.keys().iter().all(|key| keys.contains(*key))
    }
}

impl fmt::Display for TextFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys: Vec<String> = self.keys().iter().map(|key| format!("\"{key}\"")).collect();
        f.write_str(&keys.join(" and "))
    }
}

/// One sample, as it is in the file.
#[derive(Clone, Debug, PartialEq)]
pub enum RawSample {
    /// A conversation.
    Conversation {
        /// Its messages.
        turns: Vec<Turn>,
        /// Functions that the model may call, for the chat template; or none.
        tools: Value,
    },
    /// A prompt and its completion.
    Completion {
        /// The text that is given.
        prompt: String,
        /// The text that the model learns to write.
        completion: String,
    },
    /// An instruction and its output.
    Instruction {
        /// What to do.
        instruction: String,
        /// With what; may be empty.
        input: String,
        /// The text that the model learns to write.
        output: String,
    },
    /// Plain text.
    Document(String),
}

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// Who writes it, e.g. `assistant`.
    pub role: String,
    /// Whether it has neither text nor calls of functions.
    pub is_empty: bool,
    /// All its keys, for the chat template.
    pub message: Value,
}

impl Turn {
    /// A message with nothing but a text.
    pub(crate) fn new(role: &str, content: &str) -> Self {
        let message =
            value_of([("role", role), ("content", content)].into_iter().collect::<TextMap<'_>>());
        Self { role: role.to_owned(), is_empty: is_blank(content), message }
    }
}

type TextMap<'a> = std::collections::BTreeMap<&'a str, &'a str>;

/// What is wrong with a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LineFault {
    /// As in [`Error::Line`].
    pub(crate) column: Option<usize>,
    pub(crate) reason: String,
}

impl LineFault {
    pub(crate) fn new(reason: impl Into<String>) -> Self {
        Self { column: None, reason: reason.into() }
    }

    /// An error of the JSON parser, whose columns are bytes.
    fn of(line: &str, error: &serde_json::Error) -> Self {
        let message = error.to_string();
        let reason =
            message.rsplit_once(" at line ").map_or(message.as_str(), |(reason, _)| reason);
        let bytes = error.column().clamp(1, line.len().max(1));
        let before = line.as_bytes().get(..bytes - 1).unwrap_or_default();
        // Count the first byte of each character.
        let column = before.iter().filter(|byte| (**byte as i8) >= -0x40).count() + 1;
        let hint = match error.classify() {
            serde_json::error::Category::Eof => {
                ": the line ends inside its JSON object; a sample must be one line"
            }
            _ => "",
        };
        Self { column: Some(column), reason: format!("{reason}{hint}") }
    }

    pub(crate) fn at(self, path: &Path, line: usize) -> Error {
        Error::Line { path: path.to_owned(), line, column: self.column, reason: self.reason }
    }
}

/// Whether a text has no visible character.
pub(crate) fn is_blank(text: &str) -> bool {
    text.trim().is_empty()
}

// ---- files ----

/// Reads the lines of a file that are not blank.
#[derive(Debug)]
pub(crate) struct JsonLines {
    path: PathBuf,
    reader: BufReader<File>,
    number: usize,
    has_lines: bool,
}

/// A line with its number, counted from 1, or why it is not text.
pub(crate) type NumberedLine = (usize, Result<String, LineFault>);

impl JsonLines {
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("txt")) {
            let reason = "is plain text, whose samples cannot be separated: write JSON lines, \
                          {\"text\": \"…\"} for each sample";
            return Err(Error::file(path, reason));
        }
        let file = File::open(path).map_err(Error::io("open", path))?;
        let is_file = file.metadata().map_err(Error::io("open", path))?.is_file();
        if !is_file {
            return Err(Error::file(
                path,
                "is not a regular file: it is read twice, so write the lines to a file first",
            ));
        }
        Ok(Self {
            path: path.to_owned(),
            reader: BufReader::with_capacity(1 << 18, file),
            number: 0,
            has_lines: false,
        })
    }

    /// Whether a line that is not blank has been read.
    pub(crate) fn has_lines(&self) -> bool {
        self.has_lines
    }

    pub(crate) fn next(&mut self) -> Result<Option<NumberedLine>, Error> {
        loop {
            let mut bytes = Vec::new();
            let mut limited = self.reader.by_ref().take(MAX_JSON_BYTES + 1);
            limited.read_until(b'\n', &mut bytes).map_err(Error::io("read", &self.path))?;
            if bytes.is_empty() {
                return Ok(None);
            }
            self.number += 1;
            if bytes.len() as u64 > MAX_JSON_BYTES {
                let reason =
                    format!("is longer than {MAX_JSON_BYTES} bytes: is this a file of JSON lines?");
                return Err(LineFault::new(reason).at(&self.path, self.number));
            }
            let text = match String::from_utf8(bytes) {
                Ok(text) => text,
                Err(error) => {
                    self.has_lines = true;
                    let byte = error.utf8_error().valid_up_to() + 1;
                    let reason =
                        format!("byte {byte} is not UTF-8: write the file as JSON lines in UTF-8");
                    return Ok(Some((self.number, Err(LineFault::new(reason)))));
                }
            };
            let line = if self.number == 1 { text.trim_start_matches('\u{feff}') } else { &text };
            let line = line.trim_end_matches(['\n', '\r']);
            if !is_blank(line) {
                self.has_lines = true;
                return Ok(Some((self.number, Ok(line.to_owned()))));
            }
        }
    }
}

// ---- lines ----

/// The keys of a line, and the value of one of them.
#[derive(Debug, Default)]
pub(crate) struct LineKeys {
    names: BTreeSet<String>,
    /// The value of the requested key.
    pub(crate) value: Option<serde_json::Value>,
}

impl LineKeys {
    /// Reads the keys of a line, and the value of key `by`.
    pub(crate) fn read(line: &str, by: Option<&str>) -> Result<Self, LineFault> {
        if line.trim_start().starts_with('[') {
            let reason =
                "is a JSON array: write one object per line, for instance with `jq -c '.[]'`";
            return Err(LineFault { column: Some(1), reason: reason.to_owned() });
        }
        let mut json = serde_json::Deserializer::from_str(line);
        let keys =
            json.deserialize_map(KeyVisitor { by }).and_then(|keys| json.end().map(|()| keys));
        keys.map_err(|error| LineFault::of(line, &error))
    }

    /// The format of a file, by the keys of its first line.
    pub(crate) fn format(&self) -> Result<TextFormat, LineFault> {
        TextFormat::of(&self.names).ok_or_else(|| {
            let known: Vec<String> = TextFormat::ALL.iter().map(ToString::to_string).collect();
            LineFault::new(format!(
                "the keys {} are of no known format: a line needs {}",
                self.listed(),
                known.join(", or ")
            ))
        })
    }

    /// Checks that the line has the format of its file.
    pub(crate) fn require(&self, format: TextFormat) -> Result<(), LineFault> {
        if format.is_in(&self.names) {
            return Ok(());
        }
        Err(LineFault::new(match TextFormat::of(&self.names) {
            Some(other) => format!(
                "has {other}, but this file is read as lines with {format}: put samples of each format into a file of \
                 their own"
            ),
            None => {
                format!("has the keys {}, but a line of this file needs {format}", self.listed())
            }
        }))
    }

    fn listed(&self) -> String {
        const SHOWN: usize = 8;
        let mut keys: Vec<String> =
            self.names.iter().take(SHOWN).map(|key| format!("{key:?}")).collect();
        if self.names.len() > SHOWN {
            keys.push("…".to_owned());
        }
        format!("({})", keys.join(", "))
    }
}

struct KeyVisitor<'a> {
    by: Option<&'a str>,
}

impl<'de> Visitor<'de> for KeyVisitor<'_> {
    type Value = LineKeys;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<LineKeys, A::Error> {
        let mut keys = LineKeys::default();
        while let Some(name) = map.next_key::<String>()? {
            if self.by == Some(&name) {
                keys.value = Some(map.next_value()?);
            } else {
                map.next_value::<IgnoredAny>()?;
            }
            keys.names.insert(name);
        }
        Ok(keys)
    }
}

/// The sample of a line that has the keys of `format`.
pub(crate) fn parse(line: &str, format: TextFormat) -> Result<RawSample, LineFault> {
    Ok(match format {
        TextFormat::Messages => {
            let MessagesLine { messages, tools } = typed(line)?;
            RawSample::Conversation { turns: messages, tools: tools.unwrap_or_else(none) }
        }
        TextFormat::ShareGpt => {
            let ShareGptLine { conversations } = typed(line)?;
            let turns = conversations.iter().map(|turn| Turn::new(turn.from.role(), &turn.value));
            RawSample::Conversation { turns: turns.collect(), tools: none() }
        }
        TextFormat::PromptCompletion => {
            let CompletionLine { prompt, completion } = typed(line)?;
            RawSample::Completion { prompt, completion }
        }
        TextFormat::Alpaca => {
            let AlpacaLine { instruction, input, output } = typed(line)?;
            RawSample::Instruction { instruction, input: input.unwrap_or_default(), output }
        }
        TextFormat::Text => {
            let TextLine { text } = typed(line)?;
            RawSample::Document(text)
        }
    })
}

fn typed<T: DeserializeOwned>(line: &str) -> Result<T, LineFault> {
    serde_json::from_str(line).map_err(|error| LineFault::of(line, &error))
}

fn none() -> Value {
    Value::from(())
}

#[derive(Deserialize)]
struct MessagesLine {
    messages: Vec<Turn>,
    tools: Option<Value>,
}

#[derive(Deserialize)]
struct ShareGptLine {
    conversations: Vec<ShareGptTurn>,
}

#[derive(Deserialize)]
struct ShareGptTurn {
    from: Speaker,
    value: String,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Speaker {
    #[serde(alias = "user")]
    Human,
    #[serde(alias = "assistant")]
    Gpt,
    System,
}

impl Speaker {
    fn role(self) -> &'static str {
        match self {
            Self::Human => "user",
            Self::Gpt => "assistant",
            Self::System => "system",
        }
    }
}

#[derive(Deserialize)]
struct CompletionLine {
    prompt: String,
    completion: String,
}

#[derive(Deserialize)]
struct AlpacaLine {
    instruction: String,
    input: Option<String>,
    output: String,
}

#[derive(Deserialize)]
struct TextLine {
    text: String,
}

impl<'de> Deserialize<'de> for Turn {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let message = Value::deserialize(deserializer)?;
        Self::of(message).map_err(de::Error::custom)
    }
}

impl Turn {
    fn of(message: Value) -> Result<Self, String> {
        let text_of = |key: &str| {
            message.get_attr(key).ok().and_then(|value| value.as_str().map(ToOwned::to_owned))
        };
        let role = text_of("role").ok_or("a message needs a \"role\", which is a text")?;
        let content = message
            .get_attr("content")
            .map_err(|_| "a message must be an object with \"role\" and \"content\"")?;
        let has_calls = message.get_attr("tool_calls").is_ok_and(|calls| calls.is_true());
        let is_empty =
            match content.as_str() {
                Some(content) => is_blank(content) && !has_calls,
                None if (content.is_none() || content.is_undefined()) && has_calls => false,
                None => return Err(
                    "a message needs a \"content\" that is a text; other kinds are not supported"
                        .to_owned(),
                ),
            };
        Ok(Self { role, is_empty, message })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn read(line: &str) -> Result<RawSample, LineFault> {
        let format = LineKeys::read(line, None)?.format()?;
        parse(line, format)
    }

    fn conversation(line: &str) -> Vec<(String, String)> {
        match read(line).unwrap() {
            RawSample::Conversation { turns, .. } => {
                let text = |turn: &Turn| turn.message.get_attr("content").unwrap().to_string();
                turns.iter().map(|turn| (turn.role.clone(), text(turn))).collect()
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn each_format_is_detected_by_its_keys() {
        let expected = [("system", "be brief"), ("user", "hi"), ("assistant", "yo")];
        let expected = expected.map(|(role, text)| (role.to_owned(), text.to_owned()));
        let line = r#"{"id": 1, "messages": [{"role": "system", "content": "be brief"},
            {"content": "hi", "role": "user"}, {"role": "assistant", "content": "yo"}]}"#;
        assert_eq!(conversation(&line.replace('\n', " ")), expected);
        let line = r#"{"conversations": [{"from": "system", "value": "be brief"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}"#;
        assert_eq!(conversation(line), expected);
        let line = r#"{"prompt": "a", "completion": "b"}"#;
        assert_eq!(
            read(line).unwrap(),
            RawSample::Completion { prompt: "a".to_owned(), completion: "b".to_owned() }
        );
        let instruction = |input: &str| RawSample::Instruction {
            instruction: "add".to_owned(),
            input: input.to_owned(),
            output: "3".to_owned(),
        };
        for (input, expected) in
            [(r#""input": "1 2", "#, "1 2"), (r#""input": null, "#, ""), ("", "")]
        {
            let line =
                format!(r#"{{"instruction": "add", {input}"output": "3", "text": "add 3"}}"#);
            assert_eq!(read(&line).unwrap(), instruction(expected));
        }
        assert_eq!(read(r#"{"text": "a\nb"}"#).unwrap(), RawSample::Document("a\nb".to_owned()));
    }

    #[test]
    fn other_keys_of_messages_reach_the_template_in_their_order() {
        let line = r#"{"messages": [{"role": "assistant", "content": null, "tool_calls": [{"z": 1, "a": 2}]}], "tools": [{"y": 1, "b": 2}]}"#;
        let RawSample::Conversation { turns, tools } = read(line).unwrap() else { panic!() };
        assert!(!turns[0].is_empty);
        let calls = turns[0].message.get_attr("tool_calls").unwrap();
        assert_eq!(
            serde_json::to_string(&[calls, tools]).unwrap(),
            r#"[[{"z":1,"a":2}],[{"y":1,"b":2}]]"#
        );
    }

    #[test]
    fn a_bad_line_is_reported_with_its_column() {
        for (line, column, reason) in [
            (
                r#"{"text": "a"#,
                Some(11),
                "EOF while parsing a string: the line ends inside its JSON object",
            ),
            (r#"{"text": "é" 3}"#, Some(14), "expected `,` or `}`"),
            ("{", Some(1), "EOF while parsing an object"),
            (r#"{"text": "a"} {}"#, Some(15), "trailing characters"),
            ("3", Some(1), "invalid type: integer `3`, expected a JSON object"),
            (r#"[{"text": "a"}]"#, Some(1), "is a JSON array: write one object per line"),
            (r#"{"text": 3}"#, Some(10), "invalid type: integer `3`, expected a string"),
            (r#"{"messages": "hi"}"#, Some(17), "invalid type: string \"hi\", expected a sequence"),
            (r#"{"messages": [{"content": "hi"}]}"#, Some(32), "a message needs a \"role\""),
            (
                r#"{"messages": [{"role": "user"}]}"#,
                Some(31),
                "a message needs a \"content\" that is a text",
            ),
            (
                r#"{"messages": [{"role": "user", "content": [{"type": "image"}]}]}"#,
                Some(63),
                "other kinds are not",
            ),
            (r#"{"messages": ["hi"]}"#, Some(19), "a message needs a \"role\""),
            (
                r#"{"conversations": [{"from": "robot", "value": "x"}]}"#,
                Some(35),
                "unknown variant `robot`, expected one of `human`",
            ),
            (
                r#"{"prompt": "a", "answer": "b"}"#,
                None,
                "the keys (\"answer\", \"prompt\") are of no known format: a line needs \"messages\", or ",
            ),
        ] {
            let fault = read(line).unwrap_err();
            assert!(fault.reason.contains(reason), "{line}: {fault:?}");
            assert_eq!(fault.column, column, "{line}: {fault:?}");
        }
    }

    #[test]
    fn a_line_of_another_format_is_refused() {
        let keys = LineKeys::read(r#"{"prompt": "a", "completion": "b"}"#, None).unwrap();
        keys.require(TextFormat::PromptCompletion).unwrap();
        let reason = keys.require(TextFormat::Text).unwrap_err().reason;
        let expected = "has \"prompt\" and \"completion\", but this file is read as lines with \"text\": put samples of \
                        each format into a file of their own";
        assert_eq!(reason, expected);
        let keys = LineKeys::read(r#"{"question": "a"}"#, None).unwrap();
        let reason = keys.require(TextFormat::Text).unwrap_err().reason;
        assert_eq!(reason, "has the keys (\"question\"), but a line of this file needs \"text\"");
    }

    #[test]
    fn blank_lines_a_byte_order_mark_and_other_line_ends_are_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.jsonl");
        fs::write(&path, "\u{feff}{\"text\": 1}\r\n\n  \n{\"text\": 2}").unwrap();
        let mut lines = JsonLines::open(&path).unwrap();
        assert_eq!(lines.next().unwrap(), Some((1, Ok("{\"text\": 1}".to_owned()))));
        assert_eq!(lines.next().unwrap(), Some((4, Ok("{\"text\": 2}".to_owned()))));
        assert_eq!(lines.next().unwrap(), None);
    }

    #[test]
    fn a_file_that_is_not_json_lines_is_refused_with_a_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.parquet");
        fs::write(&path, b"{}\nPAR\xff").unwrap();
        let mut lines = JsonLines::open(&path).unwrap();
        lines.next().unwrap();
        let (number, line) = lines.next().unwrap().unwrap();
        let error = line.unwrap_err().at(&path, number).to_string();
        assert!(
            error.ends_with(
                "a.parquet, line 2: byte 4 is not UTF-8: write the file as JSON lines in UTF-8"
            ),
            "{error}"
        );
        let refused = |path: &Path| JsonLines::open(path).unwrap_err().to_string();
        assert!(
            refused(Path::new("book.TXT"))
                .contains("write JSON lines, {\"text\": \"…\"} for each sample")
        );
        assert!(refused(folder.path()).contains("is not a regular file"));
        assert!(
            refused(Path::new("/nowhere/a.jsonl"))
                .starts_with("cannot open /nowhere/a.jsonl: No such file")
        );
    }
}
