//! Chat templates: how a model writes a conversation as one text.
//!
//! Templates are Jinja, as transformers renders them: blocks are trimmed, loops have `break` and `continue`, strings
//! have Python's methods, `raise_exception` refuses a conversation, and `tojson` writes what Python's `json.dumps` does.
//! `strftime_now` is missing on purpose: with it, the same data would be other tokens on another day. Templates that
//! ask whether it is defined, as Llama's do, then use a fixed date.

use std::collections::BTreeMap;

use minijinja::{
    Environment, ErrorKind, Value, context,
    syntax::SyntaxConfig,
    value::{Kwargs, Serde},
};
use serde::Serialize;

use crate::Error;

/// Name of the template in its environment.
const TEMPLATE_NAME: &str = "chat";
/// Work of one rendering, in instructions of the template or 64 bytes of its values: a second, or 640 MB.
const FUEL: u64 = 10_000_000;

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    name: String,
}

/// How a rendered conversation ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChatEnd {
    /// With its last message.
    Message,
    /// With the beginning of the assistant's next message: `add_generation_prompt`.
    GenerationPrompt,
}

/// A message that the template itself reports.
#[derive(Debug, thiserror::Error)]
#[error("the template refuses the conversation")]
struct TemplateRefusal;

impl ChatTemplate {
    /// Compiles a template. `name` is its file, for errors; `special_texts` are the variables with special tokens, e.g.
    /// `bos_token`.
    ///
    /// # Errors
    /// It is not valid Jinja.
    pub fn new(
        source: &str,
        name: impl Into<String>,
        special_texts: &BTreeMap<String, String>,
    ) -> Result<Self, Error> {
        let name = name.into();
        let mut environment = Environment::new();
        environment.set_fuel(Some(FUEL));
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", refuse);
        environment.add_filter("tojson", to_json);
        for (name, text) in special_texts {
            environment.add_global(name.clone(), text.clone());
        }
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        let compiled = syntax.and_then(|syntax| {
            environment.set_syntax(syntax);
            environment.add_template_owned(TEMPLATE_NAME, without_generation_tags(source))
        });
        compiled.map_err(|error| failure(&name, &error))?;
        Ok(Self { environment, name })
    }

    /// The text of a conversation. `messages` are maps, as in the data; `tools` describes functions that the model may
    /// call, or is none.
    ///
    /// # Errors
    /// The template refuses the conversation, or uses something that is missing.
    pub fn render(&self, messages: &[Value], tools: &Value, end: ChatEnd) -> Result<String, Error> {
        let context = context! {
            messages => messages.to_vec(),
            tools => tools.clone(),
            documents => (),
            add_generation_prompt => end == ChatEnd::GenerationPrompt,
        };
        let template = self.environment.get_template(TEMPLATE_NAME);
        template
            .and_then(|template| template.render(context))
            .map_err(|error| failure(&self.name, &error))
    }
}

fn failure(name: &str, error: &minijinja::Error) -> Error {
    let detail = || error.detail().map_or_else(|| error.kind().to_string(), ToOwned::to_owned);
    let source = std::error::Error::source(error);
    let reason = match error.kind() {
        _ if source.is_some_and(|source| source.is::<TemplateRefusal>()) => {
            format!("it refuses the conversation: {}", detail())
        }
        ErrorKind::OutOfFuel => "it takes too long: does it loop for ever?".to_owned(),
        ErrorKind::UnknownFunction if detail().contains("strftime_now") => {
            "it calls strftime_now, which is not supported, because the same data would be other tokens on another \
             day: write the date into a copy of the template, and give that with --template FILE"
                .to_owned()
        }
        kind => match error.detail() {
            Some(detail) => format!("{kind}: {detail}"),
            None => kind.to_string(),
        },
    };
    Error::Template { name: name.to_owned(), line: error.line(), reason }
}

/// `raise_exception(message)`
fn refuse(message: String) -> Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message).with_source(TemplateRefusal))
}

/// The filter `tojson`, without the escapes for HTML that Jinja's own has.
fn to_json(
    value: &Value,
    indent: Option<usize>,
    named: Kwargs,
) -> Result<String, minijinja::Error> {
    let indent = match indent {
        None => named.get::<Option<usize>>("indent")?,
        indent => indent,
    };
    if named.get::<Option<bool>>("ensure_ascii")? == Some(true) {
        let reason = "tojson with ensure_ascii is not supported";
        return Err(minijinja::Error::new(ErrorKind::InvalidOperation, reason));
    }
    named.assert_all_used()?;
    let mut text = Vec::new();
    let written = match indent {
        None => {
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut text, PythonStyle))
        }
        Some(spaces) => {
            let indent = " ".repeat(spaces.min(MAX_INDENT));
            let style = serde_json::ser::PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut text, style))
        }
    };
    let failed = |reason: String| minijinja::Error::new(ErrorKind::BadSerialization, reason);
    written.map_err(|error| failed(error.to_string()))?;
    String::from_utf8(text).map_err(|error| failed(error.to_string()))
}

/// Largest indentation, in spaces.
const MAX_INDENT: usize = 16;

/// JSON in one line with a space after each comma and colon, as Python writes it.
struct PythonStyle;

impl serde_json::ser::Formatter for PythonStyle {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
    ) -> std::io::Result<()> {
        out.write_all(b": ")
    }
}

/// The template with `{% generation %}` as `{% if true %}`: transformers' own mark of the assistant's tokens, which
/// Jinja does not know. The signs that trim white space stay.
fn without_generation_tags(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut parts = source.split("{%");
    text.push_str(parts.next().unwrap_or_default());
    for part in parts {
        text.push_str("{%");
        let start =
            part.find(|c: char| !c.is_whitespace() && c != '-' && c != '+').unwrap_or(part.len());
        let (signs, rest) = part.split_at(start);
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        let (word, rest) = rest.split_at(end);
        let word = match word {
            "generation" => "if true",
            "endgeneration" => "endif",
            word => word,
        };
        text.extend([signs, word, rest]);
    }
    text
}

/// A value of JSON for a template; keys keep their order.
pub(crate) fn value_of(value: impl Serialize) -> Value {
    Value::from(Serde(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::CHATML;

    const GEMMA: &str = "\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role, please') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('user and assistant must alternate') }}
{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}";

    const LLAMA: &str = "\
{{- bos_token }}
{%- if strftime_now is defined %}{% set date = strftime_now('%d %b %Y') %}{% else %}{% set date = '26 Jul 2024' %}{% endif %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0]['content'].strip() %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date + '\\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}";

    const MISTRAL: &str = "\
{%- set ns = namespace(system='') -%}
{{ bos_token }}
{%- for message in messages -%}
  {%- if message.role == 'system' -%}{% set ns.system = message.content + '\\n\\n' %}{% continue %}
  {%- elif message.role == 'user' -%}{{ '[INST] ' + ns.system + message.content + ' [/INST]' }}{% set ns.system = '' %}
  {%- elif message.role == 'assistant' -%}{{ ' ' + message.content.rstrip() + eos_token }}
  {%- else -%}{{ raise_exception('roles are system, user and assistant') }}
  {%- endif -%}
{%- endfor -%}";

    fn template(source: &str) -> ChatTemplate {
        let special = [("bos_token", "<s>"), ("eos_token", "</s>")];
        let special = special.map(|(name, text)| (name.to_owned(), text.to_owned()));
        ChatTemplate::new(source, "chat_template.jinja", &special.into()).unwrap()
    }

    fn messages(turns: &[(&str, &str)]) -> Vec<Value> {
        turns
            .iter()
            .map(|(role, content)| context! { role => *role, content => *content })
            .collect()
    }

    fn rendered(source: &str, turns: &[(&str, &str)], end: ChatEnd) -> Result<String, String> {
        let text = template(source).render(&messages(turns), &Value::from(()), end);
        text.map_err(|error| error.to_string())
    }

    const TURNS: [(&str, &str); 3] = [("system", "be brief"), ("user", "hi "), ("assistant", "yo")];

    #[test]
    fn a_conversation_is_written_as_chatml() {
        let text = rendered(CHATML, &TURNS, ChatEnd::Message).unwrap();
        let expected = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi <|im_end|>\n\
                        <|im_start|>assistant\nyo<|im_end|>\n";
        assert_eq!(text, expected);
        let text = rendered(CHATML, &TURNS[..2], ChatEnd::GenerationPrompt).unwrap();
        assert_eq!(text, expected.strip_suffix("yo<|im_end|>\n").unwrap());
    }

    #[test]
    fn a_conversation_is_written_as_llama_3_does() {
        let text = rendered(LLAMA, &TURNS, ChatEnd::GenerationPrompt).unwrap();
        let expected = "<s><|start_header_id|>system<|end_header_id|>\n\nToday: 26 Jul 2024\nbe brief<|eot_id|>\
                        <|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>\
                        <|start_header_id|>assistant<|end_header_id|>\n\nyo<|eot_id|>\
                        <|start_header_id|>assistant<|end_header_id|>\n\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_conversation_is_written_as_mistral_does() {
        let text = rendered(MISTRAL, &TURNS, ChatEnd::Message).unwrap();
        assert_eq!(text, "<s>[INST] be brief\n\nhi  [/INST] yo</s>");
        let error = rendered(MISTRAL, &[("tool", "x")], ChatEnd::Message).unwrap_err();
        let expected = "chat template chat_template.jinja, line 7: it refuses the conversation: roles are system, user \
                        and assistant";
        assert_eq!(error, expected);
    }

    #[test]
    fn gemma_refuses_a_system_message_and_the_error_says_so() {
        let text = rendered(GEMMA, &TURNS[1..], ChatEnd::Message).unwrap();
        let expected =
            "<s><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\nyo<end_of_turn>\n";
        assert_eq!(text, expected);
        let error = rendered(GEMMA, &TURNS, ChatEnd::Message).unwrap_err();
        let expected = "chat template chat_template.jinja, line 1: it refuses the conversation: no system role, please";
        assert_eq!(error, expected);
    }

    #[test]
    fn json_in_a_template_is_written_as_python_does() {
        let of = |source: &str| {
            let json: Value =
                serde_json::from_str(r#"{"z": "<é'\"", "a": [1, 2.0, null], "b": {}}"#).unwrap();
            template(source).render(&[], &json, ChatEnd::Message).unwrap()
        };
        // Python: json.dumps(…, ensure_ascii=False)
        assert_eq!(of("{{ tools | tojson }}"), r#"{"z": "<é'\"", "a": [1, 2.0, null], "b": {}}"#);
        let indented = "{\n  \"z\": \"<é'\\\"\",\n  \"a\": [\n    1,\n    2.0,\n    null\n  ],\n  \"b\": {}\n}";
        assert_eq!(of("{{ tools | tojson(indent=2) }}"), indented);
    }

    #[test]
    fn marks_of_generated_text_are_ignored() {
        let source = "{% for message in messages %}{{ message.role }}: {%- generation %}\n {{ message.content }}\
                      {%- endgeneration -%} {% endfor %}";
        assert_eq!(
            rendered(source, &TURNS[1..], ChatEnd::Message).unwrap(),
            "user: hi assistant: yo"
        );
    }

    #[test]
    fn python_methods_work() {
        let source = "{{ messages[0].content.strip().split('e')[0].upper() }} {{ 'yes' if messages[0].content.startswith('be') }}";
        assert_eq!(rendered(source, &TURNS, ChatEnd::Message).unwrap(), "B yes");
    }

    #[test]
    fn a_bad_template_is_reported_with_its_line_and_ends() {
        let new = |source| {
            ChatTemplate::new(source, "mine.jinja", &BTreeMap::new())
                .map(|_| ())
                .unwrap_err()
                .to_string()
        };
        let error = new("\n{% for %}");
        assert!(error.starts_with("chat template mine.jinja, line 2: syntax error: "), "{error}");
        for (source, part) in [
            ("{{ strftime_now('%Y') }}", "line 1: it calls strftime_now, which is not supported"),
            (
                "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
                "it takes too long",
            ),
            ("{{ messages[9].role }}", "undefined value"),
            ("\n{{ messages.nonsense() }}", "line 2: unknown method"),
            (
                "{{ messages | tojson(ensure_ascii=true) }}",
                "tojson with ensure_ascii is not supported",
            ),
        ] {
            let error = rendered(source, &TURNS, ChatEnd::Message).unwrap_err();
            assert!(error.contains(part), "{error}");
            assert_eq!(error.lines().count(), 1);
        }
    }
}
