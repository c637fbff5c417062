use std::{fs, path::Path};

use baton_language::config;

use super::*;
use crate::{Machine, PlanRequest, RecipePlan, memory::Memory};

/// `config.json` of the published Gemma 2 2B, without keys that have defaults.
const GEMMA2_2B: &str = r#"{"model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304,
    "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 256, "max_position_embeddings": 8192, "sliding_window": 4096, "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh"}"#;
const TOKENS: u64 = 768;

fn spec(name: &str, changes: &[&str]) -> JobSpec {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../recipes/{name}.toml"));
    let changes: Vec<String> = changes.iter().map(|&change| change.to_owned()).collect();
    JobSpec::read(&file, &changes, |path| fs::read_to_string(path)).unwrap()
}

fn layout(decoder: &DecoderModel, spec: &JobSpec) -> Option<AdapterLayout> {
    let adapter = spec.adapter.as_ref();
    adapter.map(|adapter| AdapterLayout::new(decoder, adapter).unwrap())
}

fn network(spec: &JobSpec) -> Network {
    let decoder = config::read(GEMMA2_2B).unwrap();
    let adapter = layout(&decoder, spec);
    let plan = LanguagePlan { decoder: &decoder, adapter: adapter.as_ref(), mean_tokens: TOKENS };
    Network::of_language_model(spec, plan, TOKENS)
}

fn plan(spec: &JobSpec, machine: &str, mean_tokens: u64) -> RecipePlan {
    let decoder = config::read(GEMMA2_2B).unwrap();
    let adapter = layout(&decoder, spec);
    let language = Some(LanguagePlan { decoder: &decoder, adapter: adapter.as_ref(), mean_tokens });
    let request = PlanRequest {
        spec,
        samples: 20_000,
        val_samples: 1_000,
        signal: [1, 100],
        program: None,
        language,
        dollars_per_hour: None,
        calibration: None,
    };
    request.plan(Machine::named(machine).unwrap()).unwrap()
}

fn part(memory: &Memory, name: &str) -> u64 {
    memory.parts.iter().find(|part| part.name == name).map_or(0, |part| part.bytes)
}

#[test]
fn gemma_2_2b_has_its_published_sizes() {
    let spec = spec("gemma2_2b_lora_a100", &["adapter.rank=16"]);
    let network = network(&spec);
    // 20.8 million values for rank 16 on all linear layers.
    assert_eq!(network.parameters(), 20_766_720);
    // About two operations per weight and token, without the embedding.
    let weights = 2_614_341_888 - 26 * 4 * 2304 - 2304;
    let share = network.macs() as f64 / (TOKENS * weights) as f64;
    assert!((1.0..1.1).contains(&share), "{share}");
    let memory = Memory::new(&spec, &network, 1, 8);
    assert_eq!(part(&memory, "model"), 2 * 2_614_341_888);
}

#[test]
fn texts_that_an_evaluation_writes_take_time() {
    let evaluation = |changes: &[&str]| {
        plan(&spec("gemma2_2b_lora_a100", changes), "a100-40", TOKENS).evaluation
    };
    let none = evaluation(&["evaluation={ batch=16 }"]);
    let generate = |texts: &str| {
        let changes = format!("evaluation={{ batch=16, generate={{ {texts} }} }}");
        let with = evaluation(&[&changes]);
        assert!((with.longest_seconds - none.longest_seconds - with.generate_seconds).abs() < 1e-9);
        assert!(with.seconds > none.seconds);
        with.generate_seconds
    };
    let seconds = generate("samples=16, max_tokens=384");
    // Every token of a batch reads all weights, 5.2 GB at 1,555 GB/s, and starts many small operations.
    let reading = 384.0 * 5.2 / 1_555.0;
    assert!((reading..8.0 * reading).contains(&seconds), "{seconds} {reading}");
    assert!((generate("samples=16, max_tokens=768") - 2.0 * seconds).abs() < 1e-9);
    // All 1,000 samples: 63 batches.
    assert!((generate("samples=5000, max_tokens=384") - 63.0 * seconds).abs() < 1e-6);
    assert_eq!(none.generate_seconds, 0.0);
}

#[test]
fn a_model_in_4_bits_needs_less_memory_and_more_time() {
    let lora = plan(&spec("gemma2_2b_lora_a100", &["adapter.rank=16"]), "a100-40", TOKENS);
    let qlora = plan(&spec("gemma2_2b_qlora_a100", &[]), "a100-40", TOKENS);
    let model = part(&qlora.memory, "model") as f64;
    assert!((2.1e9..2.3e9).contains(&model), "{model}");
    assert_eq!(part(&qlora.memory, "activations"), part(&lora.memory, "activations"));
    assert!(lora.memory.total_bytes < 10 << 30, "{:?}", lora.memory);
    assert!(qlora.memory.total_bytes < 15 << 29, "{:?}", qlora.memory);
    assert!(qlora.seconds > lora.seconds);
    assert!(lora.fits && qlora.fits);
}

#[test]
fn recomputing_sublayers_apart_fits_the_model_into_6_gib() {
    let whole = plan(&spec("gemma2_2b_qlora_a100", &[]), "a100-40", TOKENS);
    let changes = ["train.recompute=['sublayers']"];
    let apart = plan(&spec("gemma2_2b_qlora_a100", &changes), "a100-40", TOKENS);
    assert!(apart.memory.total_bytes <= 6 << 30, "{:?}", apart.memory);
    for name in ["activations", "dense weights"] {
        assert!(part(&apart.memory, name) < part(&whole.memory, name), "{name}");
    }
    assert_eq!(part(&apart.memory, "scores"), part(&whole.memory, "scores"));
    // One more forward pass of attention.
    let share = apart.seconds / whole.seconds;
    assert!((1.03..1.12).contains(&share), "{share}");
}

#[test]
fn recomputation_and_shorter_texts_change_what_they_should() {
    let changes = ["train.recompute=[]", "train.grad_accumulation=1"];
    let kept = plan(&spec("gemma2_2b_lora_a100", &changes), "a100-40", TOKENS);
    let recomputed = plan(&spec("gemma2_2b_lora_a100", &changes[1..]), "a100-40", TOKENS);
    assert!(!kept.fits && recomputed.fits);
    assert!(kept.notes[0].contains("or set train.recompute = [\"layers\"]"), "{:?}", kept.notes);
    assert!(!kept.notes[0].contains("BatchNorm"), "{:?}", kept.notes);
    assert!(kept.seconds < recomputed.seconds);
    let shorter = plan(&spec("gemma2_2b_lora_a100", &changes[1..]), "a100-40", TOKENS / 2);
    assert_eq!(shorter.memory, recomputed.memory, "the longest text must fit");
    let share = shorter.seconds / recomputed.seconds;
    assert!((0.4..0.55).contains(&share), "{share}");
}

#[test]
fn training_all_weights_holds_them_with_their_moments() {
    let mut spec = spec("gemma2_2b_lora_a100", &[]);
    spec.adapter = None;
    let network = network(&spec);
    assert_eq!(network.parameters(), 2_614_341_888);
    let memory = Memory::new(&spec, &network, 1, 8);
    assert_eq!(part(&memory, "optimizer"), 8 * 2_614_341_888);
    assert_eq!(part(&memory, "model"), 0);
}

#[test]
fn strict_attention_keeps_the_scores_of_all_pairs_of_tokens() {
    let without_cap =
        GEMMA2_2B.replace(r#""attn_logit_softcapping": 50.0"#, r#""attn_logit_softcapping": null"#);
    let decoder = config::read(&without_cap).unwrap();
    let activations = |determinism: &str| {
        let changes = [format!("precision.determinism={determinism}"), "train.recompute=[]".into()];
        let spec = spec("gemma2_2b_lora_a100", &changes.each_ref().map(String::as_str));
        let adapter = layout(&decoder, &spec);
        let plan =
            LanguagePlan { decoder: &decoder, adapter: adapter.as_ref(), mean_tokens: TOKENS };
        let network = Network::of_language_model(&spec, plan, TOKENS);
        part(&Memory::new(&spec, &network, 1, 1), "activations")
    };
    let scores = 8 * TOKENS * TOKENS;
    let copies = 4 * TOKENS * 8 * 256;
    let more = activations("strict") - activations("fast");
    assert_eq!(more, 26 * (scores + copies) * F32_BYTES);
}
