//! `baton-worker generate`: text that a language model writes.

use std::{path::PathBuf, time::Instant};

use baton_console::{json, output};
use baton_data::InputType;
use baton_job::{
    exit::{Failure, bad_input, crash},
    ids::LocalRank,
};
use baton_language::model::read_decoder;
use baton_text::{Encoder, LossTokens, TemplateSource, Tokenizer};
use baton_trainer::{
    Learner as _,
    sampling::{Prompt, Sampling},
    torch::{self, TorchLearner, weights::Head},
};
use serde::Serialize;

use crate::eval::recipe;

/// Let a language model write.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Recipe of the job: model, adapter, number format.
    #[arg(long, value_name = "FILE")]
    recipe: PathBuf,
    /// Change one value of the recipe, e.g. --set model.path=models/smollm2. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Trained weights or an adapter, as `baton checkpoint export` writes them [default: the model's own weights, with
    /// the adapter of model.pretrained if the recipe names one].
    #[arg(long, value_name = "FILE")]
    weights: Option<PathBuf>,
    /// What the model continues. May be repeated: all texts are written at the same time.
    #[arg(long = "prompt", value_name = "TEXT", required = true, allow_hyphen_values = true)]
    prompts: Vec<String>,
    /// Continue the prompt as it is, instead of as a user's message in the model's chat template.
    #[arg(long)]
    plain: bool,
    /// Most tokens of a text.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Draw tokens by their probability, the scores divided by this first; 0 takes the most likely one.
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = temperature)]
    temperature: f64,
    /// Draw only the most likely tokens, as many as have this share of the probability together.
    #[arg(long, value_name = "P", default_value_t = 1.0, value_parser = share)]
    top_p: f64,
    /// Seed of the draws.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// libtorch threads.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: u32,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

fn temperature(text: &str) -> Result<f64, String> {
    number(text, |number| (0.0..=100.0).contains(&number), "it must be between 0 and 100")
}

fn share(text: &str) -> Result<f64, String> {
    number(text, |number| 0.0 < number && number <= 1.0, "it must be above 0 and at most 1")
}

fn number(text: &str, fits: fn(f64) -> bool, rule: &str) -> Result<f64, String> {
    let number = text.parse().map_err(|_| "it is not a number".to_owned())?;
    if fits(number) { Ok(number) } else { Err(rule.to_owned()) }
}

/// Output of `--json`.
#[derive(Serialize)]
struct GenerateResult {
    texts: Vec<WrittenText>,
    seconds: f64,
}

#[derive(Serialize)]
struct WrittenText {
    prompt: String,
    text: String,
    tokens: usize,
    /// Whether the model ended the text, instead of the limit.
    complete: bool,
}

impl WrittenText {
    fn cut_mark(&self) -> &'static str {
        if self.complete { "" } else { " …" }
    }
}

/// Generates and prints.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let spec = recipe(&args.recipe, &args.overrides)?;
    if !spec.model.arch.is_causal_lm() {
        return Err(bad_input(format!(
            "{}: model.arch = {}, but only a causal_lm writes text",
            args.recipe.display(),
            spec.model.arch.name()
        )));
    }
    let weights = args.weights.as_deref();
    weights.map_or(Ok(()), baton_checkpoint::check_weights_file).map_err(bad_input)?;
    let tokenizer = Tokenizer::load(&spec.model.path).map_err(bad_input)?;
    let (_, decoder) = read_decoder(spec.model.path.as_ref())
        .map_err(|error| bad_input(format!("model.path: {error}")))?;
    let template = match args.plain {
        true => TemplateSource::Nothing,
        false => TemplateSource::Model,
    };
    let template = template.load(&tokenizer).map_err(bad_input)?.map(|(template, _)| template);
    let encoder = Encoder::new(&tokenizer, template, LossTokens::Completions, usize::MAX);
    let encoded = |(number, prompt): (usize, &String)| -> Result<Prompt, Failure> {
        let tokens = encoder.encode_prompt(prompt).map_err(bad_input)?;
        let (count, most) = (tokens.len() as u64, decoder.max_positions);
        if tokens.iter().any(|token| u64::from(*token) >= decoder.vocabulary) {
            return Err(bad_input(format!(
                "the tokenizer in {} has tokens that the model does not have: they belong to different models",
                spec.model.path
            )));
        }
        match count {
            0 => Err(bad_input("--prompt is empty: give at least a word")),
            count if count >= most => Err(bad_input(format!(
                "--prompt has {count} tokens, but the model has {most} positions: shorten it"
            ))),
            _ => Ok(Prompt {
                tokens: tokens.into_iter().map(i64::from).collect(),
                number: number as u64,
            }),
        }
    };
    let prompts = args.prompts.iter().enumerate().map(encoded).collect::<Result<Vec<_>, _>>()?;

    let device = torch::device::open(&spec, LocalRank(0))?;
    torch::device::set_threads(args.threads);
    let mut learner = TorchLearner::new(&spec, &InputType::Tokens, device)?;
    // The matrices of a new adapter change nothing.
    match weights {
        Some(weights) => {
            torch::weights::load(&mut learner, weights, Head::FromFile).map_err(bad_input)?;
        }
        None => learner.load_initial()?,
    }
    let sampling = Sampling {
        max_tokens: args.max_tokens,
        stops: tokenizer.ends().iter().copied().map(i64::from).collect(),
        temperature: args.temperature,
        top_p: args.top_p,
        seed: args.seed,
    };
    let started = Instant::now();
    let mut texts: Vec<Vec<u32>> = vec![Vec::new(); prompts.len()];
    let is_shown_at_once = !args.json && prompts.len() == 1;
    let mut shown = String::new();
    let mut failed = None;
    let mut on_token = |text: usize, token: i64| {
        let tokens = &mut texts[text];
        tokens.push(u32::try_from(token).unwrap_or_default());
        let progress = match is_shown_at_once {
            true => show_new(&tokenizer, tokens, &mut shown),
            false => Ok(()),
        };
        failed = progress.err();
        failed.is_none()
    };
    learner.generate(&prompts, &sampling, &mut on_token)?;
    if let Some(failure) = failed {
        return Err(failure);
    }
    let texts = args.prompts.iter().zip(texts).map(|(prompt, tokens)| {
        let complete = tokens.last().is_some_and(|last| tokenizer.ends().contains(last));
        let text = text_of(&tokenizer, &tokens)?;
        Ok(WrittenText { prompt: prompt.clone(), text, tokens: tokens.len(), complete })
    });
    let texts = texts.collect::<Result<Vec<_>, Failure>>()?;
    let written = GenerateResult { texts, seconds: started.elapsed().as_secs_f64() };
    json::print(args.json, &written, |written| match is_shown_at_once {
        // What was held back, because it could have been the beginning of a character.
        true => {
            let rest = |text: &WrittenText| {
                let rest = text.text.strip_prefix(shown.as_str()).unwrap_or_default();
                format!("{rest}{}", text.cut_mark())
            };
            written.texts.iter().map(rest).collect()
        }
        false => shown_texts(&written.texts),
    });
    Ok(())
}

fn text_of(tokenizer: &Tokenizer, tokens: &[u32]) -> Result<String, Failure> {
    tokenizer.decode_until_end(tokens).map_err(|error| crash(error.to_string()))
}

/// Prints what is new, once its last character is complete.
fn show_new(tokenizer: &Tokenizer, tokens: &[u32], shown: &mut String) -> Result<(), Failure> {
    let text = text_of(tokenizer, tokens)?;
    if let Some(new) = text.strip_prefix(shown.as_str())
        && !new.ends_with(char::REPLACEMENT_CHARACTER)
    {
        output::part(new);
        *shown = text;
    }
    Ok(())
}

fn shown_texts(texts: &[WrittenText]) -> String {
    let shown =
        texts.iter().map(|text| format!("> {}\n{}{}", text.prompt, text.text, text.cut_mark()));
    shown.collect::<Vec<_>>().join("\n\n")
}
