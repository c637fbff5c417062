//! `baton model import`

use std::path::PathBuf;

use baton_job::exit::Failure;
use baton_language::{GgufFile, GgufModel, NewFolder, merge::COPIED, output::MAX_FILE_BYTES};
use baton_text::{GgufVocabulary, Tokenizer};

use super::language_failure;
use crate::{
    commands::{
        bar::{BYTES, CommandProgress},
        data::text_failure,
        dtype::Dtype,
    },
    failure::bad_input,
    human, json,
};

/// Turn a GGUF file into the folder of a language model, to train it
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton model import SmolLM2-135M-Instruct.Q4_1.gguf --to models/smollm2
      then: model.path = \"models/smollm2\" in a recipe, and baton data tokenize --tokenizer models/smollm2
  baton model import gemma-2-2b.Q8_0.gguf --to models/gemma --tokenizer downloads/gemma-2-2b --dtype bf16
      with the tokenizer of the original model

The folder has config.json, model.safetensors, tokenizer.json and tokenizer_config.json with the chat template, \
as Hugging Face has them. Quantized weights become numbers of the chosen type; what the quantization lost stays lost.

Architectures: llama (also Mistral and SmolLM), qwen2, qwen3, gemma2, gemma3. Tensors: F32, F16, BF16, Q4_0, Q4_1, \
Q8_0. Tokenizers: byte-level BPE divided as gpt-2, smollm, llama-bpe or qwen2; for others, such as SentencePiece's, \
name a folder with the original tokenizer.json by --tokenizer.")]
pub(crate) struct Args {
    /// The GGUF file
    file: PathBuf,
    /// The folder to write; it must not exist, or be empty
    #[arg(long, value_name = "FOLDER")]
    to: PathBuf,
    /// The type of the weights
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    dtype: Dtype,
    /// Copy the tokenizer from the folder of a model instead of converting that of the file
    #[arg(long, value_name = "MODEL_FOLDER")]
    tokenizer: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let file = GgufFile::open(&args.file).map_err(language_failure)?;
    let model = GgufModel::new(&file, args.dtype.float()).map_err(language_failure)?;
    let folder = NewFolder::create(&args.to).map_err(language_failure)?;
    // First what may be refused.
    let tokenizer = write_tokenizer(args, &file, &folder)?;
    let rows = model.decoder.vocabulary;
    if u64::from(tokenizer.vocab_size()) > rows {
        return Err(bad_input(format!(
            "{}: the tokenizer has ids up to {}, but the model only {rows} rows: give the tokenizer of this model",
            args.file.display(),
            tokenizer.vocab_size() - 1
        )));
    }
    let mut progress = CommandProgress::new(BYTES, model.bytes(), args.json);
    let written = model.write(&folder, MAX_FILE_BYTES, &mut |bytes| progress.show_bytes(bytes));
    progress.finish();
    written.and_then(|()| folder.finish()).map_err(language_failure)?;
    let imported = json::ImportedModel {
        path: args.to.display().to_string(),
        family: model.decoder.family.clone(),
        parameters: model.decoder.parameters(),
        dtype: args.dtype.name(),
        bytes: model.bytes(),
        vocab_size: tokenizer.vocab_size(),
        chat_template: tokenizer.chat_template().is_some(),
    };
    json::print(args.json, &imported, |imported| {
        let json::ImportedModel { path, family, parameters, dtype, bytes, .. } = imported;
        let template = if imported.chat_template { "" } else { "no " };
        format!(
            "wrote {path}: a {family} model with {} weights in {dtype} ({}), {} tokens, {template}chat template",
            human::grouped(*parameters),
            human::bytes(*bytes),
            human::grouped(imported.vocab_size.into()),
        )
    });
    Ok(())
}

/// Writes the files of the tokenizer, and loads it as a check.
fn write_tokenizer(args: &Args, file: &GgufFile, folder: &NewFolder) -> Result<Tokenizer, Failure> {
    if let Some(from) = &args.tokenizer {
        let tokenizer = Tokenizer::load(from).map_err(text_failure)?;
        folder.copy(from, COPIED).map_err(language_failure)?;
        return Ok(tokenizer);
    }
    let of_file = |problem: String| bad_input(format!("{} {problem}", args.file.display()));
    let files = vocabulary(file).files().map_err(of_file)?;
    for (name, content) in
        [("tokenizer.json", &files.rules), ("tokenizer_config.json", &files.config)]
    {
        folder.write(name, content.as_bytes()).map_err(language_failure)?;
    }
    Tokenizer::load(folder.path())
        .map_err(|error| of_file(format!("has a tokenizer that cannot be used: {error}")))
}

fn vocabulary(file: &GgufFile) -> GgufVocabulary {
    let text = |key: &str| file.text(key).unwrap_or_default().to_owned();
    let id = |name: &str| file.integer(&format!("tokenizer.ggml.{name}_token_id"));
    let architecture = text("general.architecture");
    GgufVocabulary {
        model: text("tokenizer.ggml.model"),
        pre: text("tokenizer.ggml.pre"),
        tokens: file.texts("tokenizer.ggml.tokens").to_vec(),
        types: file.integers("tokenizer.ggml.token_type").to_vec(),
        merges: file.texts("tokenizer.ggml.merges").to_vec(),
        bos: id("bos"),
        eos: id("eos"),
        pad: id("padding"),
        unknown: id("unknown"),
        adds_bos: file.flag("tokenizer.ggml.add_bos_token"),
        chat_template: file.text("tokenizer.chat_template").map(str::to_owned),
        max_tokens: file.integer(&format!("{architecture}.context_length")),
    }
}
