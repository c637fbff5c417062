//! A sample → tokens, and labels where the loss counts.
//!
//! A sample becomes one text of *pieces*: what is given (a prompt, the header of an assistant's message) and what the
//! model learns to write (a completion, an assistant's message up to the end of its turn).
//!
//! # Tokens at the borders of pieces
//!
//! A token must not belong to two pieces: while the model writes, the given text is complete before it begins. If no
//! token of the text crosses a border, the tokens are those of the text as a whole, as the model has seen such texts
//! before. Where one would cross a border, the text is cut there, and both parts are tokenized separately, the second as a
//! continuation: a tokenizer that puts a space in front of a text does not put one there.
//!
//! # Chat
//!
//! The conversation is rendered as a whole, and so are its beginnings: the messages before each assistant's message with
//! the generation prompt, and those up to and including it. If each is a prefix of the whole, the assistant's message is
//! what lies between. Some templates change earlier messages (they remove reasoning, or move the system message): then
//! there is no such split, which is an error.

use baton_data::NO_LABEL;

use crate::{
    ChatTemplate, Error, Tokenizer,
    chat::ChatEnd,
    samples::{RawSample, TextFormat, Turn, is_blank},
    tokenizer::TokenSpan,
};

/// Which tokens the loss counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossTokens {
    /// Those of completions, or of the assistant's messages with the end of their turns. All of a plain text.
    Completions,
    /// All.
    All,
}

/// Turns samples into tokens.
#[derive(Debug)]
pub struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    template: Option<ChatTemplate>,
    loss: LossTokens,
    /// Maximum number of tokens of a sample.
    max_tokens: usize,
}

/// The tokens of a sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedSample {
    /// Their ids.
    pub tokens: Vec<u32>,
    /// One label per token: see [`LABELS_FIELD`](baton_data::LABELS_FIELD).
    pub labels: Vec<i32>,
    /// Number of tokens before the sample was cut to the maximum.
    pub whole_tokens: usize,
}

impl EncodedSample {
    /// Number of labels that are predicted: see [`PREDICTED_FIELD`](baton_data::PREDICTED_FIELD).
    #[must_use]
    pub fn predicted(&self) -> usize {
        self.labels.iter().skip(1).filter(|label| **label != NO_LABEL).count()
    }

    /// The largest token; 0 if there are none.
    #[must_use]
    pub fn largest(&self) -> u32 {
        self.tokens.iter().copied().max().unwrap_or_default()
    }
}

/// A part of a text, up to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    /// First byte after it.
    end: usize,
    counts: bool,
}

impl<'a> Encoder<'a> {
    /// An encoder of samples of at most `max_tokens` tokens.
    #[must_use]
    pub fn new(
        tokenizer: &'a Tokenizer,
        template: Option<ChatTemplate>,
        loss: LossTokens,
        max_tokens: usize,
    ) -> Self {
        Self { tokenizer, template, loss, max_tokens }
    }

    /// The tokens of a sample.
    ///
    /// # Errors
    /// There is nothing to learn from the sample, the chat template refuses it, or the tokenizer has no token for a part
    /// of it.
    pub fn encode(&self, sample: &RawSample) -> Result<EncodedSample, Error> {
        let whole = match (sample, &self.template) {
            (RawSample::Document(text), _) => {
                require_text(text, "the text")?;
                let pieces = [Piece { end: text.len(), counts: true }];
                self.with_ends(self.labelled(text, &pieces)?, true)?
            }
            (RawSample::Conversation { turns, tools }, Some(template)) => {
                self.chat(template, turns, tools)?
            }
            (RawSample::Conversation { .. }, None) => return Err(self.missing_template()),
            (RawSample::Completion { prompt, completion }, template) => {
                require_text(completion, "the completion")?;
                match template {
                    Some(template) => self.exchange(template, prompt, completion)?,
                    None => self.continuation(prompt, completion)?,
                }
            }
            (RawSample::Instruction { instruction, input, output }, template) => {
                require_text(output, "the output")?;
                match template {
                    Some(template) => {
                        self.exchange(template, &with_input(instruction, input), output)?
                    }
                    None => self.continuation(&alpaca_prompt(instruction, input), output)?,
                }
            }
        };
        self.cut(whole)
    }

    /// The tokens of a prompt, which the model continues: with a chat template, the message of a user and the beginning
    /// of the assistant's.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_prompt(&self, prompt: &str) -> Result<Vec<u32>, Error> {
        let Some(template) = &self.template else {
            let tokens = self.tokenizer.encode(prompt)?;
            return Ok(self.missing_bos(&tokens).into_iter().chain(tokens).collect());
        };
        let message = Turn::new("user", prompt).message;
        let text = template.render(&[message], &().into(), ChatEnd::GenerationPrompt)?;
        self.tokenizer.encode(&text)
    }

    /// Checks that the model folder has what samples of a format need.
    ///
    /// # Errors
    /// There is no chat template for conversations, or no token that ends other texts.
    pub fn check(&self, format: TextFormat) -> Result<(), Error> {
        let needs_template = matches!(format, TextFormat::Messages | TextFormat::ShareGpt);
        let ends_itself = self.template.is_some() && format != TextFormat::Text;
        match (needs_template, ends_itself) {
            (true, false) => Err(self.missing_template()),
            (false, false) if self.tokenizer.eos().is_none() => Err(self.missing_eos()),
            _ => Ok(()),
        }
    }

    fn missing_template(&self) -> Error {
        let reason = "has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json), which \
                      conversations need: give one with --template FILE";
        Error::file(self.tokenizer.folder(), reason)
    }

    fn missing_eos(&self) -> Error {
        let reason =
            "has no end-of-text token in its vocabulary: set eos_token in tokenizer_config.json";
        Error::file(self.tokenizer.folder(), reason)
    }

    /// A prompt and its completion as a conversation.
    fn exchange(
        &self,
        template: &ChatTemplate,
        prompt: &str,
        completion: &str,
    ) -> Result<Labelled, Error> {
        let turns = [Turn::new("user", prompt), Turn::new("assistant", completion)];
        self.chat(template, &turns, &().into())
    }

    /// A prompt and its completion as one text.
    fn continuation(&self, prompt: &str, completion: &str) -> Result<Labelled, Error> {
        let counts_prompt = self.loss == LossTokens::All;
        let text = [prompt, completion].concat();
        let pieces = [
            Piece { end: prompt.len(), counts: counts_prompt },
            Piece { end: text.len(), counts: true },
        ];
        self.with_ends(self.labelled(&text, &pieces)?, counts_prompt)
    }

    fn chat(
        &self,
        template: &ChatTemplate,
        turns: &[Turn],
        tools: &minijinja::Value,
    ) -> Result<Labelled, Error> {
        let is_reply = |turn: &Turn| turn.role == ASSISTANT;
        if let Some(empty) = turns.iter().position(|turn| is_reply(turn) && turn.is_empty) {
            return Err(Error::Sample(format!(
                "message {} is the assistant's and empty: leave it out",
                empty + 1
            )));
        }
        if turns.is_empty() || self.loss == LossTokens::Completions && !turns.iter().any(is_reply) {
            let reason =
                "the conversation has no message of the assistant, so there is nothing to learn";
            return Err(Error::Sample(reason.to_owned()));
        }
        let messages: Vec<minijinja::Value> =
            turns.iter().map(|turn| turn.message.clone()).collect();
        let whole = template.render(&messages, tools, ChatEnd::Message)?;
        let mut pieces = Vec::new();
        if self.loss == LossTokens::Completions {
            for (i, _) in turns.iter().enumerate().filter(|(_, turn)| is_reply(turn)) {
                let given = template.render(&messages[..i], tools, ChatEnd::GenerationPrompt)?;
                let written = template.render(&messages[..=i], tools, ChatEnd::Message)?;
                if !(whole.starts_with(&written) && written.starts_with(&given)) {
                    return Err(Error::Sample(cannot_be_split(i)));
                }
                pieces.push(Piece { end: given.len(), counts: false });
                pieces.push(Piece { end: written.len(), counts: true });
            }
        }
        pieces.push(Piece { end: whole.len(), counts: self.loss == LossTokens::All });
        self.labelled(&whole, &pieces)
    }

    /// The tokens of a text, labelled by piece.
    fn labelled(&self, text: &str, pieces: &[Piece]) -> Result<Labelled, Error> {
        let spans = self.spans(text, pieces)?;
        let mut labelled = Labelled::default();
        for (token, span) in spans {
            // Tokens without text, which some tokenizers add, belong to what follows.
            let piece = pieces.iter().find(|piece| span.start < piece.end).or(pieces.last());
            labelled.push(token, piece.is_some_and(|piece| piece.counts))?;
        }
        Ok(labelled)
    }

    /// The tokens of a text, none of which crosses a border of pieces.
    fn spans(&self, text: &str, pieces: &[Piece]) -> Result<Vec<TokenSpan>, Error> {
        let mut spans = Vec::new();
        let mut start = 0;
        // Ends of the parts that are still to be tokenized, the nearest last.
        let mut ends = vec![text.len()];
        while let Some(end) = ends.pop() {
            let part = text.get(start..end).unwrap_or_default();
            let found = match start {
                0 => self.tokenizer.encode_spans(part)?,
                _ => self.tokenizer.encode_continuation(part)?,
            };
            let found: Vec<TokenSpan> = found
                .into_iter()
                .map(|(token, span)| (token, start + span.start..start + span.end))
                .collect();
            let is_crossed = |border: &usize| {
                found.iter().any(|(_, span)| span.start < *border && *border < span.end)
            };
            match pieces.iter().map(|piece| piece.end).find(is_crossed) {
                Some(border) => ends.extend([end, border]),
                None => {
                    spans.extend(found);
                    start = end;
                }
            }
        }
        Ok(spans)
    }

    /// BOS, if the model's texts start with it and these tokens do not.
    fn missing_bos(&self, tokens: &[u32]) -> Option<u32> {
        let bos = self.tokenizer.bos().filter(|_| self.tokenizer.adds_bos())?.id;
        (tokens.first() != Some(&bos)).then_some(bos)
    }

    /// BOS, if the model's texts start with it, and EOS around the tokens of a text, unless the text has them already.
    fn with_ends(&self, tokens: Labelled, counts_bos: bool) -> Result<Labelled, Error> {
        let eos = self.tokenizer.eos().ok_or_else(|| self.missing_eos())?.id;
        let mut whole = Labelled::default();
        if let Some(bos) = self.missing_bos(&tokens.tokens) {
            whole.push(bos, counts_bos)?;
        }
        let ends = tokens.tokens.last() == Some(&eos);
        whole.tokens.extend(tokens.tokens);
        whole.labels.extend(tokens.labels);
        if !ends {
            whole.push(eos, true)?;
        }
        Ok(whole)
    }

    /// Cuts to the maximal length.
    fn cut(&self, whole: Labelled) -> Result<EncodedSample, Error> {
        let Labelled { mut tokens, mut labels } = whole;
        let whole_tokens = tokens.len();
        tokens.truncate(self.max_tokens);
        labels.truncate(self.max_tokens);
        let sample = EncodedSample { tokens, labels, whole_tokens };
        if sample.predicted() > 0 {
            return Ok(sample);
        }
        let reason = if whole_tokens > self.max_tokens {
            format!(
                "nothing to learn is left of its {whole_tokens} tokens after the first {}: raise --sequence, or shorten \
                 what comes before the completion",
                self.max_tokens
            )
        } else {
            format!("it has {whole_tokens} tokens, none of which is predicted from one before it")
        };
        Err(Error::Sample(reason))
    }
}

const ASSISTANT: &str = "assistant";

/// Tokens and labels of a whole sample.
#[derive(Default)]
struct Labelled {
    tokens: Vec<u32>,
    labels: Vec<i32>,
}

impl Labelled {
    fn push(&mut self, token: u32, counts: bool) -> Result<(), Error> {
        let label = i32::try_from(token);
        let label = label
            .map_err(|_| Error::Tokenizer(format!("token {token} does not fit into 31 bits")))?;
        self.tokens.push(token);
        self.labels.push(if counts { label } else { NO_LABEL });
        Ok(())
    }
}

fn require_text(text: &str, what: &str) -> Result<(), Error> {
    if is_blank(text) {
        return Err(Error::Sample(format!("{what} is empty, so there is nothing to learn")));
    }
    Ok(())
}

fn cannot_be_split(turn: usize) -> String {
    format!(
        "the chat template cannot be split at message {}: it writes the messages up to there in another way if more \
         follow. Count the loss over all tokens with --loss all, or give a template that never changes earlier messages \
         with --template FILE",
        turn + 1
    )
}

fn with_input(instruction: &str, input: &str) -> String {
    if is_blank(input) { instruction.to_owned() } else { format!("{instruction}\n\n{input}") }
}

/// The prompt of Stanford's Alpaca, with which other programs train and use models of such data too.
fn alpaca_prompt(instruction: &str, input: &str) -> String {
    let (task, input) = match is_blank(input) {
        true => (". Write a response that", String::new()),
        false => (
            ", paired with an input that provides further context. Write a response that",
            format!("### Input:\n{input}\n\n"),
        ),
    };
    format!(
        "Below is an instruction that describes a task{task} appropriately completes the request.\n\n\
         ### Instruction:\n{instruction}\n\n{input}### Response:\n"
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{samples, testing::Model};

    /// `text` with the tokens without loss in brackets.
    fn shown(tokenizer: &Tokenizer, sample: &EncodedSample) -> String {
        assert_eq!(sample.tokens.len(), sample.labels.len());
        for (token, label) in sample.tokens.iter().zip(&sample.labels) {
            assert!(*label == NO_LABEL || *label == *token as i32, "{sample:?}");
        }
        let runs = sample.labels.chunk_by(|a, b| (*a == NO_LABEL) == (*b == NO_LABEL));
        let mut start = 0;
        let parts = runs.map(|run| {
            let text = tokenizer.decode(&sample.tokens[start..][..run.len()]).unwrap();
            start += run.len();
            if run[0] == NO_LABEL { format!("[{text}]") } else { text }
        });
        parts.collect()
    }

    #[test]
    fn a_prompt_is_a_users_message_or_the_beginning_of_a_text() {
        const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}\
                                {% if add_generation_prompt %}<|im_start|>assistant {% endif %}";
        let case = Case::new(None);
        let tokenizer = case.model.load();
        let shown = |template: Option<&str>, prompt: &str| {
            let template = template.map(|source| {
                ChatTemplate::new(source, "chat_template.jinja", tokenizer.special_texts()).unwrap()
            });
            let encoder = Encoder::new(&tokenizer, template, LossTokens::Completions, 8);
            tokenizer.decode(&encoder.encode_prompt(prompt).unwrap()).unwrap()
        };
        assert_eq!(shown(None, "hi you"), "<s>hi you");
        assert_eq!(shown(None, "<s>hi"), "<s>hi", "no second one");
        assert_eq!(
            shown(Some(TEMPLATE), "hi"),
            "<|im_start|>user hi<|im_end|><|im_start|>assistant "
        );
    }

    fn sample(line: &str) -> RawSample {
        let keys = samples::LineKeys::read(line, None).unwrap();
        samples::parse(line, keys.format().unwrap()).unwrap()
    }

    struct Case {
        model: Model,
        template: Option<&'static str>,
        loss: LossTokens,
        max_tokens: usize,
    }

    impl Case {
        fn new(template: Option<&'static str>) -> Self {
            let model = Model::new();
            model.config(&json!({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": true}));
            Self { model, template, loss: LossTokens::Completions, max_tokens: 1024 }
        }

        fn encode(&self, line: &str) -> Result<String, String> {
            let tokenizer = self.model.load();
            let template = self.template.map(|source| {
                ChatTemplate::new(source, "chat_template.jinja", tokenizer.special_texts()).unwrap()
            });
            let encoder = Encoder::new(&tokenizer, template, self.loss, self.max_tokens);
            let encoded = encoder.encode(&sample(line)).map_err(|error| error.to_string())?;
            Ok(shown(&tokenizer, &encoded))
        }
    }

    const TWO_TURNS: &str = r#"{"messages": [{"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]}"#;

    #[test]
    fn every_message_of_the_assistant_counts_with_the_end_of_its_turn() {
        let mut case = Case::new(Some(crate::testing::CHATML));
        let expected = "[<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n\
                        <|im_start|>assistant\n]yo<|im_end|>\n[<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n]\
                        b<|im_end|>\n[<|im_start|>user\nc<|im_end|>\n]";
        assert_eq!(case.encode(TWO_TURNS).unwrap(), expected);
        case.loss = LossTokens::All;
        assert_eq!(case.encode(TWO_TURNS).unwrap(), expected.replace(['[', ']'], ""));
    }

    #[test]
    fn templates_without_a_generation_prompt_are_split_too() {
        const MISTRAL: &str = "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}\
                               {{ '[INST] ' + message.content + ' [/INST]' }}{% else %}\
                               {{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}";
        let case = Case::new(Some(MISTRAL));
        let line = r#"{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"},
            {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}"#;
        let expected = "[<s>[INST] hi [/INST]] yo</s>[[INST] a [/INST]] b</s>";
        assert_eq!(case.encode(line).unwrap(), expected);
    }

    #[test]
    fn a_template_that_changes_earlier_messages_is_refused_unless_all_tokens_count() {
        // As templates of reasoning models: only the last message keeps its mark.
        const CHANGES: &str = "{% for message in messages %}{{ message.role + ': ' + message.content }}\
                               {% if loop.last %}{{ '!' }}{% endif %}{{ eos_token }}{% endfor %}\
                               {% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}";
        let mut case = Case::new(Some(CHANGES));
        let reason = case.encode(TWO_TURNS).unwrap_err();
        assert!(
            reason.starts_with("the chat template cannot be split at message 3: it writes"),
            "{reason}"
        );
        assert!(reason.contains("--loss all"), "{reason}");
        case.loss = LossTokens::All;
        assert!(case.encode(TWO_TURNS).unwrap().ends_with("user: c!</s>"));
    }

    #[test]
    fn a_prompt_has_no_loss_and_its_completion_has_with_the_end_of_the_text() {
        let mut case = Case::new(None);
        let line = r#"{"prompt": "hi", "completion": " yo"}"#;
        assert_eq!(case.encode(line).unwrap(), "[<s>hi] yo</s>");
        let line_with_ends = r#"{"prompt": "<s>hi", "completion": " yo</s>"}"#;
        assert_eq!(case.encode(line_with_ends).unwrap(), "[<s>hi] yo</s>", "ends are not repeated");
        case.loss = LossTokens::All;
        assert_eq!(case.encode(line).unwrap(), "<s>hi yo</s>");
        case.template = Some(crate::testing::CHATML);
        case.loss = LossTokens::Completions;
        let expected = "[<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n] yo<|im_end|>\n";
        assert_eq!(case.encode(line).unwrap(), expected);
    }

    #[test]
    fn an_instruction_is_alpacas_prompt_or_a_message_of_the_user() {
        let mut case = Case::new(None);
        let line = r#"{"instruction": "add", "input": "1 2", "output": "3"}"#;
        let expected = "[<s>Below is an instruction that describes a task, paired with an input that provides further \
                        context. Write a response that appropriately completes the request.\n\n### Instruction:\nadd\n\n\
                        ### Input:\n1 2\n\n### Response:\n]3</s>";
        assert_eq!(case.encode(line).unwrap(), expected);
        let without = r#"{"instruction": "add", "input": "", "output": "3"}"#;
        let expected = "[<s>Below is an instruction that describes a task. Write a response that appropriately completes \
                        the request.\n\n### Instruction:\nadd\n\n### Response:\n]3</s>";
        assert_eq!(case.encode(without).unwrap(), expected);
        case.template = Some(crate::testing::CHATML);
        let expected =
            "[<|im_start|>user\nadd\n\n1 2<|im_end|>\n<|im_start|>assistant\n]3<|im_end|>\n";
        assert_eq!(case.encode(line).unwrap(), expected);
        let expected = "[<|im_start|>user\nadd<|im_end|>\n<|im_start|>assistant\n]3<|im_end|>\n";
        assert_eq!(case.encode(without).unwrap(), expected);
    }

    #[test]
    fn all_of_a_plain_text_counts() {
        let case = Case::new(Some(crate::testing::CHATML));
        assert_eq!(case.encode(r#"{"text": "hi you"}"#).unwrap(), "<s>hi you</s>", "no template");
    }

    #[test]
    fn no_token_crosses_a_border() {
        let case = Case::new(None);
        let tokenizer = case.model.load();
        let tokens = |prompt: &str, completion: &str| {
            let encoder = Encoder::new(&tokenizer, None, LossTokens::Completions, 99);
            let sample = RawSample::Completion {
                prompt: prompt.to_owned(),
                completion: completion.to_owned(),
            };
            encoder.encode(&sample).unwrap()
        };
        let [space, a, space_a] = ["Ġ", "a", "Ġa"].map(|token| case.model.id(token));
        let [bos, eos] = ["<s>", "</s>"].map(|token| case.model.id(token));
        // " a" is one token, but not if the border is inside it.
        assert_eq!(tokens("b", " a").tokens, [bos, case.model.id("b"), space_a, eos]);
        let cut = tokens("b ", "a");
        assert_eq!(cut.tokens, [bos, case.model.id("b"), space, a, eos]);
        assert_eq!(cut.labels, [NO_LABEL, NO_LABEL, NO_LABEL, a as i32, eos as i32]);
        // A character of three bytes, none of which is a token with others.
        assert_eq!(tokens("€", "€").predicted(), 4);
    }

    /// Tokenizers of the kind of SentencePiece put a space in front of every text; a completion must not get one.
    #[test]
    fn a_completion_is_tokenized_as_it_continues_its_prompt() {
        let case = Case::new(None);
        case.model.change_rules(|rules| {
            rules["pre_tokenizer"]["add_prefix_space"] = true.into();
        });
        assert_eq!(case.encode(r#"{"prompt": "a:", "completion": "b"}"#).unwrap(), "[<s> a:]b</s>");
        assert_eq!(
            case.encode(r#"{"prompt": "a: ", "completion": "b"}"#).unwrap(),
            "[<s> a: ]b</s>"
        );
    }

    #[test]
    fn the_first_label_is_not_predicted() {
        let sample =
            EncodedSample { tokens: vec![7, 9, 8], labels: vec![7, NO_LABEL, 8], whole_tokens: 3 };
        assert_eq!((sample.predicted(), sample.largest()), (1, 9));
    }

    #[test]
    fn a_sample_without_anything_to_learn_is_refused() {
        let case = Case { max_tokens: 8, ..Case::new(Some(crate::testing::CHATML)) };
        for (line, part) in [
            (r#"{"prompt": "hi", "completion": " "}"#, "the completion is empty"),
            (r#"{"instruction": "hi", "output": ""}"#, "the output is empty"),
            (r#"{"text": "\n"}"#, "the text is empty"),
            (r#"{"messages": []}"#, "no message of the assistant"),
            (r#"{"messages": [{"role": "user", "content": "hi"}]}"#, "no message of the assistant"),
            (
                r#"{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]}"#,
                "message 2 is the assistant's and empty",
            ),
            (
                TWO_TURNS,
                "nothing to learn is left of its 63 tokens after the first 8: raise --sequence",
            ),
        ] {
            let reason = case.encode(line).unwrap_err();
            assert!(reason.contains(part), "{reason}");
        }
    }

    #[test]
    fn a_model_without_template_or_end_of_text_is_refused_with_a_remedy() {
        let case = Case::new(None);
        let refused = |format| {
            let tokenizer = case.model.load();
            let encoder = Encoder::new(&tokenizer, None, LossTokens::Completions, 9);
            encoder.check(format).err().map(|error| error.to_string())
        };
        let reason = refused(TextFormat::Messages).unwrap();
        assert!(
            reason.contains("has no chat template") && reason.contains("--template FILE"),
            "{reason}"
        );
        assert_eq!(refused(TextFormat::Text), None);
        case.model.config(&json!({"bos_token": "<s>"}));
        let reason = refused(TextFormat::Alpaca).unwrap();
        assert!(reason.ends_with("set eos_token in tokenizer_config.json"), "{reason}");
    }
}
