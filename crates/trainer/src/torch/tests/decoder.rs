//! Language models: texts that do not see each other, adapters, recomputation, dropout. `make parity ARGS=language`
//! compares with transformers and PEFT; tests/tests/language.rs trains one with real processes.

#[path = "../../../../language/tests/kit/mod.rs"]
mod models;
#[path = "../../../../text/tests/kit/mod.rs"]
mod tokenizers;

use std::path::Path;

use baton_data::Inputs;
use baton_language::{
    WeightSource,
    decoder::BaseTensor,
    model::read_decoder,
    nf4::Nf4,
    peft::{ADAPTER_CONFIG, ADAPTER_WEIGHTS},
};
use models::{FAMILIES, VOCABULARY, config_of, write_model, write_tensors};
use tempfile::TempDir;

use super::*;
use crate::{
    learner::Error,
    sampling::{Prompt, Sampling},
    torch::{LoadedModel, weights},
};

const NO_LABEL: i64 = baton_data::NO_LABEL as i64;

/// A learner with a small model of a family, and the folder of the model.
fn model(family: &str, changes: &[&str]) -> (TorchLearner, TempDir) {
    device::set_threads(1);
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path(), &config_of(family), 3);
    (open(folder.path(), changes).unwrap(), folder)
}

fn open(folder: &Path, changes: &[&str]) -> Result<TorchLearner, Error> {
    TorchLearner::new(&recipe_of(folder, changes), &InputType::Tokens, Device::Cpu)
}

fn recipe_of(folder: &Path, changes: &[&str]) -> JobSpec {
    let path = format!("model.path={}", folder.display());
    let mut all = vec!["model.arch=causal_lm", path.as_str(), "model.num_classes=0"];
    all.extend(["model.zero_init_gamma=false", "loss={ kind='next_token' }"]);
    all.extend(["data.sequence=64", "adapter={ rank=3, alpha=6 }", "schedule.lr=0.05"]);
    all.extend(changes);
    recipe(&all)
}

/// Texts of these lengths; the first third of each has no labels.
fn texts(lengths: &[i64]) -> Batch {
    let (mut tokens, mut labels) = (Vec::new(), Vec::new());
    for (text, length) in (1..).zip(lengths) {
        for position in 0..*length {
            let token = (text * 17 + position * 5 + position * position) % i64::from(VOCABULARY);
            tokens.push(token);
            labels.push(if position < length / 3 { NO_LABEL } else { token });
        }
    }
    let samples = (0..lengths.len() as u64).collect();
    let inputs = Inputs::Tokens { tokens, lengths: lengths.to_vec() };
    Batch { inputs, labels, samples, ..Batch::default() }
}

/// One of the texts alone.
fn alone(batch: &Batch, text: usize) -> Batch {
    let Inputs::Tokens { tokens, lengths } = &batch.inputs else { panic!("no texts") };
    let start: i64 = lengths[..text].iter().sum();
    let range = start as usize..(start + lengths[text]) as usize;
    Batch {
        inputs: Inputs::Tokens {
            tokens: tokens[range.clone()].to_vec(),
            lengths: vec![lengths[text]],
        },
        labels: batch.labels[range].to_vec(),
        samples: vec![batch.samples[text]],
        ..Batch::default()
    }
}

/// Gives the adapters' `B`, which begin as zeros, other values.
fn disturb(learner: &mut TorchLearner) {
    for step in 0..2 {
        train_at(0.1, learner, &texts(&[9, 12]), step);
    }
}

fn leaf_of(learner: &mut TorchLearner, batch: &Batch) -> (Vec<f32>, Sums) {
    let mut leaf = learner.new_leaf().unwrap();
    learner.gradient(batch, 0.1, &mut leaf).unwrap();
    let sums = sums_of(&mut leaf);
    (values(&leaf.gradient), sums)
}

fn assert_close(found: &[f32], expected: &[f32], within: f32) {
    let largest = expected.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
    assert!(largest > 0.0, "nothing to compare");
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= within * largest, "{found} is not {expected}");
    }
}

#[test]
fn no_text_sees_another_in_any_family() {
    for family in FAMILIES {
        let (mut learner, _folder) = model(family, &[]);
        disturb(&mut learner);
        // Longer and shorter than the window of 6.
        let batch = texts(&[11, 2, 5, 17]);
        let (together, sums) = leaf_of(&mut learner, &batch);
        let mut summed = vec![0.0; together.len()];
        let mut each = Sums::default();
        for text in 0..4 {
            let (gradient, sums) = leaf_of(&mut learner, &alone(&batch, text));
            summed.iter_mut().zip(gradient).for_each(|(sum, value)| *sum += value);
            each.add(&sums);
        }
        assert_close(&together, &summed, 2e-5);
        assert!((sums.loss - each.loss).abs() < 1e-4 * each.loss, "{family}");
        // 11 - 3, 2 - 1 (the first token is never predicted), 5 - 1, 17 - 5
        assert_eq!(
            (sums.count, each.count, sums.others == each.others),
            (25, 25, true),
            "{family}"
        );
    }
}

#[test]
fn a_token_beyond_the_window_has_no_influence() {
    let (mut learner, _folder) = model("mistral", &[]);
    // Two layers with windows of 6 tokens: the last token sees the 11 newest ones.
    let score = |learner: &mut TorchLearner, first: i64, length: i64| {
        let mut batch = texts(&[length]);
        let Inputs::Tokens { tokens, .. } = &mut batch.inputs else { panic!("no texts") };
        tokens[0] = first;
        batch.labels.fill(NO_LABEL);
        batch.labels[length as usize - 1] = 5;
        evaluated(learner, &batch).loss
    };
    assert_ne!(score(&mut learner, 7, 12), score(&mut learner, 8, 12));
    assert_eq!(score(&mut learner, 7, 13), score(&mut learner, 8, 13));
}

#[test]
fn recomputed_layers_give_the_same_bits_with_dropout_too() {
    let cases = [
        ("llama", ""),
        ("gemma2", ""),
        // The first layer begins with its feed-forward part; keys and values have no gradient.
        ("gemma2", ", targets=['gate_proj']"),
        ("gemma2", ", targets=['q_proj']"),
        ("qwen3", ", base='nf4'"),
    ];
    for (family, more) in cases {
        let results = |recompute: &str| {
            let adapter = format!("adapter={{ rank=3, alpha=6, dropout=0.3{more} }}");
            let (mut learner, _folder) = model(family, &[&adapter, recompute]);
            disturb(&mut learner);
            leaf_of(&mut learner, &texts(&[9, 14]))
        };
        let kept = results("train.recompute=[]");
        let all = ["['layers']", "['sublayers']", "['layers.0', 'sublayers']"];
        let some = ["['layers.0']", "['layers.1']", "['layers.0', 'layers.1']"];
        for recompute in all.into_iter().chain(some) {
            assert!(
                results(&format!("train.recompute={recompute}")) == kept,
                "{family} {more} {recompute}"
            );
        }
    }
}

#[test]
fn recomputed_layers_give_the_same_bits_without_an_adapter() {
    for family in ["gemma2", "qwen3"] {
        let results = |recompute: &str| {
            let folder = tempfile::tempdir().unwrap();
            write_model(folder.path(), &config_of(family), 3);
            let recompute = format!("train.recompute={recompute}");
            let spec = JobSpec { adapter: None, ..recipe_of(folder.path(), &[&recompute]) };
            let mut learner = TorchLearner::new(&spec, &InputType::Tokens, Device::Cpu).unwrap();
            leaf_of(&mut learner, &texts(&[9, 14]))
        };
        let kept = results("[]");
        for recompute in ["['layers']", "['sublayers']", "['layers.0']"] {
            assert!(results(recompute) == kept, "{family} {recompute}");
        }
    }
}

/// The highest use of memory of this process so far, MiB, after the gradient of some texts. `None` if other tests share
/// the process.
#[allow(unsafe_code, reason = "glibc has no other way to fix the threshold of a running process")]
fn peak_mib(folder: &Path, changes: &[&str], lengths: &[i64]) -> Option<u64> {
    unsafe extern "C" {
        fn mallopt(parameter: i32, value: i32) -> i32;
    }
    const M_MMAP_THRESHOLD: i32 = -3;
    if std::env::var_os("NEXTEST").is_none() {
        println!("test skipped: it needs a process of its own, which cargo-nextest gives it");
        return None;
    }
    // Tensors go back to the kernel when they end, so that the highest use of memory is theirs.
    // SAFETY: it changes where new blocks come from, not the blocks that exist.
    assert_eq!(unsafe { mallopt(M_MMAP_THRESHOLD, 1 << 20) }, 1);
    leaf_of(&mut open(folder, changes).unwrap(), &texts(lengths));
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    Some(line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024)
}

#[test]
fn sublayers_that_are_recomputed_apart_need_the_least_memory() {
    device::set_threads(1);
    let folder = tempfile::tempdir().unwrap();
    let mut config = config_of("llama");
    // Bytes of a token: 16 KiB in each matrix inside the feed-forward part, 8 in attention, 1 between layers.
    for (key, value) in [("intermediate_size", 4096), ("head_dim", 512), ("hidden_size", 256)] {
        config[key] = value.into();
    }
    write_model(folder.path(), &config, 3);
    // The highest use only grows, so the least comes first.
    let peaks = ["['sublayers']", "['layers']", "[]"].map(|recompute| {
        let recompute = format!("train.recompute={recompute}");
        peak_mib(folder.path(), &[&recompute, "data.sequence=128"], &[125; 16])
    });
    let [Some(apart), Some(layers), Some(kept)] = peaks else { return };
    // A matrix of attention has 16 MiB, and four are kept.
    assert!(apart + 24 < layers && layers + 48 < kept, "{apart} {layers} {kept}");
}

#[test]
fn capped_scores_are_not_kept_for_the_gradient() {
    device::set_threads(1);
    let folder = tempfile::tempdir().unwrap();
    let mut config = config_of("gemma2");
    for key in ["max_position_embeddings", "sliding_window"] {
        config[key] = 1024.into();
    }
    config["num_hidden_layers"] = 8.into();
    write_model(folder.path(), &config, 3);
    let sequence = "data.sequence=1024";
    let Some(short) = peak_mib(folder.path(), &[sequence], &[8]) else { return };
    let long = peak_mib(folder.path(), &[sequence], &[1000]).unwrap();
    // The scores of a layer have 16 MiB, and two matrices of them would be kept in each of 8 layers.
    assert!(long < short + 150, "{short} {long}");
}

#[test]
fn dropout_depends_on_the_micro_batch_alone() {
    let dropout = "adapter={ rank=3, alpha=6, dropout=0.3 }";
    let (mut learner, folder) = model("llama", &[dropout]);
    disturb(&mut learner);
    let first = texts(&[9, 14]);
    let (gradient, _) = leaf_of(&mut learner, &first);
    assert_eq!(leaf_of(&mut learner, &first).0, gradient);
    let later = Batch { epoch: 1, ..first.clone() };
    assert_ne!(leaf_of(&mut learner, &later).0, gradient);
    let elsewhere = Batch { samples: vec![8, 9], ..first.clone() };
    assert_ne!(leaf_of(&mut learner, &elsewhere).0, gradient);
    // An evaluation drops nothing: with the same adapter, there is no difference.
    let mut plain = open(folder.path(), &[]).unwrap();
    let adapter = learner.state_dict().unwrap();
    for (entry, view) in plain.state_views().unwrap() {
        let (_, value) = adapter.iter().find(|(name, _)| *name == entry.name).unwrap();
        view.shallow_clone().copy_(value);
    }
    plain.invalidate();
    assert_ne!(leaf_of(&mut plain, &first).0, gradient);
    assert_eq!(evaluated(&mut learner, &first), evaluated(&mut plain, &first));
}

#[test]
fn an_adapter_learns_and_leaves_the_model_as_it_is() {
    let (mut learner, _folder) = model("qwen3", &["optimizer={ kind='adamw' }"]);
    let batch = texts(&[16, 16]);
    let before = evaluated(&mut learner, &batch).loss;
    for step in 0..30 {
        train_at(0.02, &mut learner, &batch, step);
    }
    let after = evaluated(&mut learner, &batch);
    assert!(after.loss < 0.5 * before, "{before} to {}", after.loss);
    let regions: Vec<&str> = state(&mut learner).iter().map(|(name, _)| *name).collect();
    assert_eq!(regions, ["weights", "exp_avg", "exp_avg_sq", "bn_running"]);
    let names: Vec<String> = learner.tensors().into_iter().map(|tensor| tensor.name).collect();
    assert!(names.iter().all(|name| name.contains(".lora_")), "{names:?}");
}

#[test]
fn an_adapter_described_with_another_factor_is_refused() {
    let (mut learner, folder) = model(FAMILIES[0], &[]);
    let tensors = learner.state_dict().unwrap().into_iter().map(|(name, tensor)| {
        let shape = tensor.size().into_iter().map(|dim| dim as u64).collect();
        (BaseTensor { name, shape }, values(&tensor))
    });
    let weights = folder.path().join(ADAPTER_WEIGHTS);
    write_tensors(&weights, &tensors.collect::<Vec<_>>());
    let mut load_described = |alpha: u32| {
        let config = format!(r#"{{"r": 3, "lora_alpha": {alpha}}}"#);
        std::fs::write(folder.path().join(ADAPTER_CONFIG), config).unwrap();
        weights::load(&mut learner, &weights, weights::Head::FromFile)
    };
    load_described(6).unwrap();
    let error = load_described(12).unwrap_err().to_string();
    assert!(error.contains("set adapter.alpha = 12"), "{error}");
}

#[test]
fn training_all_weights_begins_with_those_of_the_model() {
    for family in ["llama", "gemma2", "qwen2"] {
        let (mut adapted, folder) = model(family, &[]);
        let text = "adapter={ rank=3, alpha=6 }";
        let spec = recipe(&[
            "model.arch=causal_lm",
            "model.num_classes=0",
            "model.zero_init_gamma=false",
            &format!("model.path={}", folder.path().display()),
            "loss={ kind='next_token' }",
            "data.sequence=64",
            text,
        ]);
        let spec = JobSpec { adapter: None, ..spec };
        let mut whole = TorchLearner::new(&spec, &InputType::Tokens, Device::Cpu).unwrap();
        let batch = texts(&[11, 9]);
        let [a, b] = [&mut adapted, &mut whole].map(|learner| evaluated(learner, &batch));
        assert!((a.loss - b.loss).abs() < 1e-5 * a.loss, "{family}: {} and {}", a.loss, b.loss);

        // The gradient of a tied embedding has two parts, so it is compared with differences of losses.
        let mut leaf = whole.new_leaf().unwrap();
        whole.gradient(&batch, 1.0, &mut leaf).unwrap();
        let gradients = whole.gradients(&leaf).unwrap();
        for name in [
            "model.embed_tokens.weight",
            "model.layers.1.mlp.down_proj.weight",
            "model.norm.weight",
        ] {
            let (_, gradient) = gradients.iter().find(|(found, _)| found == name).unwrap();
            let direction = gradient / gradient.norm();
            let mut loss_at = |step: f64| {
                let views = whole.state_views().unwrap();
                let (_, view) = views.into_iter().find(|(entry, _)| entry.name == name).unwrap();
                view.shallow_clone().copy_(&(&view + &direction * step));
                whole.invalidate();
                let loss = evaluated(&mut whole, &batch).loss;
                view.shallow_clone().copy_(&(&view - &direction * step));
                loss
            };
            let difference = (loss_at(5e-3) - loss_at(-5e-3)) / 1e-2;
            let norm = gradient.norm().double_value(&[]);
            assert!(
                (difference / norm - 1.0).abs() < 0.02,
                "{family} {name}: {difference} and {norm}"
            );
        }
    }
}

#[test]
fn bf16_stays_near_fp32() {
    let (mut wide, folder) = model("llama", &[]);
    let mut narrow = open(folder.path(), &["precision.compute=bf16"]).unwrap();
    let batch = texts(&[16, 12]);
    let [a, b] = [&mut wide, &mut narrow].map(|learner| evaluated(learner, &batch).loss);
    assert!((a - b).abs() < 0.02 * a && a.to_bits() != b.to_bits(), "{a} and {b}");
    let (first, _) = leaf_of(&mut wide, &batch);
    let (second, _) = leaf_of(&mut narrow, &batch);
    let norm = |values: &[f32]| values.iter().map(|value| value * value).sum::<f32>().sqrt();
    let difference: Vec<f32> = first.iter().zip(&second).map(|(a, b)| a - b).collect();
    assert!(norm(&difference) < 0.05 * norm(&first));
}

#[test]
fn the_gradients_of_many_equal_tokens_are_summed_in_f32() {
    let (mut wide, folder) = model("llama", &[]);
    let mut narrow = open(folder.path(), &["precision.compute=bf16"]).unwrap();
    let one = texts(&[16]);
    let Inputs::Tokens { tokens, lengths } = &one.inputs else { panic!("no texts") };
    let inputs = Inputs::Tokens { tokens: tokens.repeat(600), lengths: lengths.repeat(600) };
    let (labels, samples) = (one.labels.repeat(600), (0..600).collect());
    let batch = Batch { inputs, labels, samples, ..Batch::default() };
    let [wide, narrow] = [&mut wide, &mut narrow].map(|learner| leaf_of(learner, &batch).0);
    let norm = |values: &[f32]| values.iter().map(|value| value * value).sum::<f32>().sqrt();
    let difference: Vec<f32> = wide.iter().zip(&narrow).map(|(a, b)| a - b).collect();
    assert!(norm(&difference) < 0.05 * norm(&wide));
}

/// Greedy generation.
fn greedy(max_tokens: u32) -> Sampling {
    Sampling { max_tokens, stops: Vec::new(), temperature: 0.0, top_p: 1.0, seed: 0 }
}

fn generated(learner: &mut TorchLearner, prompts: &[Vec<i64>], how: &Sampling) -> Vec<Vec<i64>> {
    let mut texts = vec![Vec::new(); prompts.len()];
    let mut on_token = |text: usize, token: i64| {
        texts[text].push(token);
        true
    };
    learner.generate(&numbered(prompts), how, &mut on_token).unwrap();
    texts
}

fn numbered(prompts: &[Vec<i64>]) -> Vec<Prompt> {
    let prompt = |(number, tokens): (u64, &Vec<i64>)| Prompt { tokens: tokens.clone(), number };
    (0..).zip(prompts).map(prompt).collect()
}

#[test]
fn generated_text_is_what_the_model_predicts_without_a_cache_in_any_family() {
    for family in FAMILIES {
        let (mut learner, _folder) = model(family, &[]);
        disturb(&mut learner);
        // Longer and shorter than the windows of 6 tokens.
        let prompts = [vec![3, 14, 15], vec![9, 2, 6, 5, 3, 5, 8, 9, 7], vec![11]];
        let texts = generated(&mut learner, &prompts, &greedy(10));
        for (prompt, text) in prompts.iter().zip(&texts) {
            assert_eq!(text.len(), 10);
            let whole = [prompt.as_slice(), text].concat();
            let length = whole.len() as i64;
            // Each generated token is the most likely one after those before it.
            let labels =
                (0..whole.len()).map(|i| if i < prompt.len() { NO_LABEL } else { whole[i] });
            let labels = labels.collect();
            let inputs = Inputs::Tokens { tokens: whole, lengths: vec![length] };
            let batch = Batch { inputs, labels, samples: vec![0], ..Batch::default() };
            let sums = evaluated(&mut learner, &batch);
            assert_eq!((sums.count, sums.others[0]), (10, 10.0), "{family}: all predicted");
        }
        // Together or alone.
        assert_eq!(generated(&mut learner, &prompts[1..2], &greedy(10)), texts[1..2], "{family}");
    }
}

#[test]
fn generation_ends_at_a_stop_at_the_last_position_or_when_the_caller_wants() {
    let (mut learner, _folder) = model("llama", &[]);
    let prompts = [vec![3, 14, 15], vec![7, 8]];
    let texts = generated(&mut learner, &prompts, &greedy(12));
    let stop = texts[0][4];
    let first = texts[0].iter().position(|token| *token == stop).unwrap();
    let how = Sampling { stops: vec![stop], ..greedy(12) };
    assert_eq!(generated(&mut learner, &prompts, &how)[0], texts[0][..=first]);
    // 128 positions.
    let long = [(0..120).map(|i| i % 50).collect()];
    assert_eq!(generated(&mut learner, &long, &greedy(100))[0].len(), 9);
    let mut count = 0;
    let mut on_token = |_, _| {
        count += 1;
        count < 3
    };
    learner.generate(&numbered(&prompts), &greedy(12), &mut on_token).unwrap();
    assert_eq!(count, 3);
    let sampled = Sampling { temperature: 1.5, seed: 5, ..greedy(12) };
    let again = generated(&mut learner, &prompts, &sampled);
    assert_eq!(generated(&mut learner, &prompts, &sampled), again);
    assert_ne!(generated(&mut learner, &prompts, &Sampling { seed: 6, ..sampled }), again);
}

#[test]
fn an_evaluation_continues_the_prompts_of_samples() {
    device::set_threads(1);
    let model = tokenizers::Model::chatml();
    let tokenizer = baton_text::Tokenizer::load(model.folder()).unwrap();
    let mut config = config_of("llama");
    config["vocab_size"] = model.vocab_size().into();
    write_model(model.folder(), &config, 5);
    let recipe = "evaluation.generate={ samples=2, max_tokens=7, syntax='python' }";
    let mut learner = open(model.folder(), &[recipe]).unwrap();
    let ids = |text: &str| -> Vec<i64> {
        tokenizer.encode(text).unwrap().into_iter().map(i64::from).collect()
    };
    // A turn before, and what a template writes after the end of one.
    let (prompts, end) = ([ids("hi you"), ids("hi</s>\na b c")], ids("hi</s>\n"));
    let (mut tokens, mut labels) = (Vec::new(), Vec::new());
    for prompt in &prompts {
        tokens.extend(prompt.iter().chain(&end));
        labels.extend(prompt.iter().map(|_| NO_LABEL).chain(end.iter().copied()));
    }
    let lengths = prompts.iter().map(|prompt| (prompt.len() + end.len()) as i64).collect();
    let inputs = Inputs::Tokens { tokens, lengths };
    let batch = Batch { inputs, labels, samples: vec![40, 41], ..Batch::default() };
    let before = evaluated(&mut learner, &batch);
    let raw = EvaluatedWeights::Raw;
    let texts = learner.write_texts(&batch, raw, &mut || false).unwrap().unwrap();

    let ends: Vec<i64> = tokenizer.ends().iter().copied().map(i64::from).collect();
    let how = Sampling { stops: ends.clone(), ..greedy(7) };
    let expected = generated(&mut learner, &prompts, &how);
    for (position, (text, expected)) in texts.iter().zip(expected).enumerate() {
        let kept = expected.iter().filter(|token| !ends.contains(token));
        let kept: Vec<u32> = kept.map(|token| *token as u32).collect();
        assert_eq!(text.text, tokenizer.decode(&kept).unwrap());
        assert_eq!(text.sample, 40 + position as u64);
        assert_eq!(
            (text.prompt.as_str(), text.reference.as_str()),
            (["hi you", "hi</s>\na b c"][position], "hi")
        );
    }
    assert_eq!(texts.len(), 2);
    assert_eq!(evaluated(&mut learner, &batch), before);
    let mut calls = 0;
    let mut third = || {
        calls += 1;
        calls == 3
    };
    assert_eq!(learner.write_texts(&batch, raw, &mut third).unwrap(), None);
    assert_eq!(calls, 3, "it ends at the token after which it is interrupted");
    for region in learner.regions().into_iter().filter(|region| region.name == "weights") {
        host(region.buffer).fill(f32::NAN);
    }
    let texts = learner.write_texts(&batch, raw, &mut || false).unwrap().unwrap();
    assert!(texts.iter().all(|text| text.text.is_empty()), "{texts:?}");

    std::fs::remove_file(model.folder().join("tokenizer.json")).unwrap();
    let error = open(model.folder(), &[recipe]).unwrap_err().to_string();
    assert!(
        error.starts_with("evaluation.generate: ") && error.contains("has no tokenizer.json"),
        "{error}"
    );
}

#[test]
fn a_quantised_model_computes_what_one_with_its_values_computes() {
    for family in ["llama", "gemma2"] {
        let adapter = "adapter={ rank=3, alpha=6, dropout=0.2, base='nf4' }";
        let (mut quantised, folder) = model(family, &[adapter]);
        let names = std::fs::read_dir(folder.path()).unwrap();
        assert_eq!(names.count(), 3, "config.json, model.safetensors, and the quantised weights");

        let source = WeightSource::open(folder.path()).unwrap();
        let (_, decoder) = read_decoder(folder.path()).unwrap();
        let linears = decoder.linear_weights();
        let values = decoder.tensors().into_iter().map(|tensor| {
            let (float, bytes) = source.read(&tensor.name).unwrap();
            let values = float.decode(&bytes);
            let values = match linears.contains(&tensor) {
                true => Nf4::quantize(&values).values(values.len()),
                false => values,
            };
            (tensor, values)
        });
        let values: Vec<_> = values.collect();
        write_tensors(&folder.path().join("model.safetensors"), &values);
        let mut dense = open(folder.path(), &["adapter={ rank=3, alpha=6, dropout=0.2 }"]).unwrap();

        let batch = texts(&[9, 14]);
        for learner in [&mut quantised, &mut dense] {
            disturb(learner);
        }
        assert!(leaf_of(&mut quantised, &batch) == leaf_of(&mut dense, &batch), "{family}");
        assert_eq!(evaluated(&mut quantised, &batch), evaluated(&mut dense, &batch), "{family}");
    }
}

#[test]
fn weights_that_a_spare_has_loaded_are_those_of_the_model_at_the_start() {
    for base in ["fp32", "nf4"] {
        let adapter = format!("adapter={{ rank=3, alpha=6, base='{base}' }}");
        let (mut first, folder) = model("llama", &[&adapter]);
        let spec = recipe_of(folder.path(), &[&adapter]);
        let loaded = || {
            let loaded = LoadedModel::read(&spec).unwrap();
            assert!(loaded.is_some());
            loaded
        };
        let start = |loaded| {
            let mut learner =
                TorchLearner::blank_with(&spec, &InputType::Tokens, Device::Cpu, loaded).unwrap();
            learner.initialise().unwrap();
            disturb(&mut learner);
            leaf_of(&mut learner, &texts(&[9, 14]))
        };
        disturb(&mut first);
        let first = leaf_of(&mut first, &texts(&[9, 14]));
        assert!(start(loaded()) == first, "{base}");

        let before = loaded();
        write_model(folder.path(), &config_of("llama"), 4);
        let changed = start(before);
        assert!(changed != first && changed == start(None), "{base}");
    }
    let (_, folder) = model("llama", &[]);
    let mut whole = recipe_of(folder.path(), &[]);
    whole.adapter = None;
    assert!(LoadedModel::read(&whole).unwrap().is_none(), "nothing is frozen");
}

#[test]
fn what_does_not_fit_the_model_is_refused_with_its_key() {
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path(), &config_of("llama"), 3);
    for (change, expected) in [
        (
            "adapter={ rank=3, alpha=6, targets=['qkv'] }",
            "adapter.targets: qkv is the name of no linear layer",
        ),
        ("train.recompute=['layers.2']", "train.recompute: layers.2 is not a layer of this model"),
        (
            "model.no_decay=['*.bias']",
            "model.no_decay = [*.bias]: *.bias is the name of no parameter",
        ),
        ("data.sequence=500", "max_position_embeddings = 128, but data.sequence = 500"),
    ] {
        let error = open(folder.path(), &[change]).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let file = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&file, bytes).unwrap();
    for base in ["fp32", "nf4"] {
        let change = format!("adapter.base='{base}'");
        let error = open(folder.path(), &[&change]).unwrap_err().to_string();
        assert!(error.contains("finite") && error.contains("download the model again"), "{error}");
    }
}
