//! Models that are read, and those that are refused.
#![allow(clippy::unwrap_used, reason = "a test may fail loudly")]

mod kit;
#[path = "kit/recipe.rs"]
mod recipe;

use std::{fs, process::Command};

use baton_language::{
    Activation, AdapterLayout, DecoderModel, LanguageModel, LinearKind, NormScale, RopeScaling,
    WeightSource, adapter::describe_whole, config, decoder::FINAL_NORM,
};
use baton_model::{Float, Init};
use baton_recipe::{
    JobSpec,
    spec::{Adapter, BaseFormat},
};
use kit::{FAMILIES, config_of, write_model, write_weights};
use recipe::recipe;
use serde_json::{Value, json};

fn read(config: &Value) -> DecoderModel {
    config::read(&config.to_string()).unwrap()
}

fn changed(family: &str, change: Value) -> Value {
    let mut config = config_of(family);
    config.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    config
}

fn refused(family: &str, change: Value) -> String {
    config::read(&changed(family, change).to_string()).unwrap_err()
}

fn windows(decoder: &DecoderModel) -> Vec<Option<u64>> {
    decoder.layers.iter().map(|layer| layer.window).collect()
}

fn adapter(targets: &[&str]) -> Adapter {
    Adapter {
        rank: 4,
        alpha: 8.0,
        dropout: 0.0,
        rslora: false,
        targets: targets.iter().map(|target| (*target).to_owned()).collect(),
        base: BaseFormat::Auto,
    }
}

#[test]
fn families_differ_as_their_published_code_does() {
    let [llama, mistral, qwen2, qwen3, gemma2, gemma3] = FAMILIES.map(|f| read(&config_of(f)));
    assert_eq!((llama.norm_scale, llama.activation), (NormScale::Weight, Activation::Silu));
    assert_eq!(windows(&llama), [None, None]);
    assert_eq!(windows(&mistral), [Some(6), Some(6)]);
    assert_eq!((windows(&qwen2), qwen2.has_qkv_bias), (vec![None, Some(6)], true));
    assert!(!qwen2.has_output_bias && !mistral.has_qkv_bias && qwen3.has_head_norms);
    assert_eq!(
        (windows(&gemma2), gemma2.norm_scale),
        (vec![Some(6), None], NormScale::OnePlusWeight)
    );
    assert_eq!((gemma2.score_cap, gemma2.logit_cap), (Some(50.0), Some(30.0)));
    assert_eq!(gemma2.embedding_scale, Some(24_f64.sqrt()));
    assert_eq!((gemma2.ties_head, gemma2.has_post_norms), (true, true));
    assert_eq!((gemma3.score_cap, gemma3.has_head_norms), (None, true));
    let thetas: Vec<f64> = gemma3.layers.iter().map(|layer| layer.rope.theta).collect();
    assert_eq!((windows(&gemma3), thetas), (vec![Some(6), None], vec![1e4, 1e6]));
    assert_eq!(gemma2.score_scale, 8_f64.powf(-0.5));
    assert_eq!(llama.score_scale, 6_f64.powf(-0.5));
}

#[test]
fn both_spellings_of_rotary_positions_are_read() {
    let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16});
    let old = read(&changed("llama", json!({"rope_theta": 5e5, "rope_scaling": scaling})));
    let mut new = scaling.clone();
    new["rope_theta"] = json!(5e5);
    let new = read(&changed("llama", json!({"rope_parameters": new})));
    assert_eq!(old, new);
    let rope = old.layers[0].rope;
    let expected = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 16.0 };
    assert_eq!((rope.theta, rope.scaling), (5e5, expected));
    let of_kind = json!({"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}});
    let gemma = read(&changed("gemma3_text", json!({"rope_parameters": of_kind})));
    assert_eq!(gemma.layers[0].rope.theta, 2e4);
    assert_eq!(gemma.layers[1].rope.scaling, RopeScaling::Linear { factor: 8.0 });
}

#[test]
fn a_key_of_gemma_2_9b_that_transformers_does_not_read_is_not_refused() {
    let with_key = changed("gemma2", json!({"sliding_window_size": 4096}));
    assert_eq!(read(&with_key), read(&changed("gemma2", json!({}))));
}

#[test]
fn what_is_not_computed_is_refused_by_name() {
    for (family, change, expected) in [
        (
            "llama",
            json!({"model_type": "mamba"}),
            "has model_type = \"mamba\", which Baton does not know",
        ),
        ("llama", json!({"hidden_act": "relu"}), "has hidden_act = \"relu\": only silu"),
        ("llama", json!({"num_key_value_heads": 3}), "is no multiple of num_key_value_heads = 3"),
        ("llama", json!({"num_experts": 8}), "has num_experts = 8, which Baton does not know"),
        ("llama", json!({"attention_dropout": 0.1}), "has attention_dropout = 0.1: only 0"),
        ("llama", json!({"head_dim": 5}), "has head_dim = 5, which must be even"),
        ("llama", json!({"hidden_size": -1}), "has hidden_size = -1, which must be a whole number"),
        ("llama", json!({"hidden_size": null}), "has no hidden_size"),
        ("llama", json!({"hidden_size": 1 << 20}), "has hidden_size = 1048576: at most 262144"),
        (
            "llama",
            json!({"num_attention_heads": 1 << 16, "head_dim": 8}),
            "has num_attention_heads x head_dim = 524288: at most 262144",
        ),
        ("llama", json!({"vocab_size": 1 << 23}), "has vocab_size = 8388608: at most 4194304"),
        (
            "llama",
            json!({"rms_norm_eps": 0.0}),
            "has rms_norm_eps = 0.0, which must be a number above 0",
        ),
        (
            "llama",
            json!({"rope_scaling": {"type": "yarn", "factor": 4.0}}),
            "of type \"yarn\": only default",
        ),
        ("llama", json!({"rope_scaling": {"type": "linear"}}), "has no factor"),
        (
            "llama",
            json!({"rope_scaling": {"type": "linear", "factor": 0}}),
            "has factor = 0, which must be a number above 0",
        ),
        (
            "llama",
            json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}),
            "has high_freq_factor = 4, which must be above low_freq_factor = 4",
        ),
        ("llama", json!({"num_hidden_layers": 5000}), "has num_hidden_layers = 5000: at most 4096"),
        (
            "mistral",
            json!({"sliding_window": 0}),
            "has sliding_window = 0, which must be a whole number",
        ),
        (
            "gemma2",
            json!({"layer_types": ["full_attention"]}),
            "layer_types and num_hidden_layers of different",
        ),
        (
            "gemma2",
            json!({"layer_types": ["full_attention", "chunked"]}),
            "a layer of type \"chunked\"",
        ),
    ] {
        let error = refused(family, change);
        assert!(error.contains(expected), "{error}");
    }
    assert!(config::read("{").unwrap_err().starts_with("is not valid JSON"));
    // What switches nothing on is no reason to refuse a model.
    read(&changed("llama", json!({"some_list": [], "some_flag": false, "nothing": null})));
}

#[test]
fn a_model_in_several_files_is_the_same_as_in_one() {
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (folder.path().join("one"), folder.path().join("two"));
    let decoder = write_model(&one, &config_of("llama"), 5);
    write_model(&two, &config_of("llama"), 5);
    fs::remove_file(two.join("model.safetensors")).unwrap();
    let is_first = |name: &str| name.starts_with("model.layers.0");
    write_weights(&two.join("a.safetensors"), &decoder, 5, is_first);
    write_weights(&two.join("b.safetensors"), &decoder, 5, |name| !is_first(name));
    let file = |name: &str| if is_first(name) { "a.safetensors" } else { "b.safetensors" };
    let map: serde_json::Map<String, Value> =
        decoder.tensors().into_iter().map(|t| (t.name.clone(), file(&t.name).into())).collect();
    let index = two.join("model.safetensors.index.json");
    fs::write(&index, json!({"weight_map": map}).to_string()).unwrap();

    let [one, two] =
        [&one, &two].map(|folder| LanguageModel::of_recipe(&recipe(folder, &[])).unwrap());
    for tensor in decoder.tensors() {
        let read = one.source.read(&tensor.name).unwrap();
        assert_eq!(read, two.source.read(&tensor.name).unwrap());
        assert_eq!(read.0, Float::F32);
    }
    assert_ne!(one.digest().unwrap(), two.digest().unwrap(), "of the files");

    fs::remove_file(folder.path().join("two/b.safetensors")).unwrap();
    let error = LanguageModel::of_recipe(&recipe(&folder.path().join("two"), &[])).unwrap_err();
    assert!(
        error.to_string().contains("b.safetensors does not exist: download all files"),
        "{error}"
    );
    fs::write(index, json!({"weight_map": {"x": "../../etc/passwd"}}).to_string()).unwrap();
    let error = WeightSource::open(&folder.path().join("two")).unwrap_err().to_string();
    assert!(error.contains("which is not in its folder"), "{error}");
}

#[test]
fn files_that_do_not_fit_their_description_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let weights = folder.join("model.safetensors");
    let error = |spec: &JobSpec| LanguageModel::of_recipe(spec).unwrap_err().to_string();
    let spec = recipe(folder, &[]);
    assert!(error(&spec).contains("config.json does not exist: name the folder of a model"));
    let decoder = write_model(folder, &config_of("llama"), 1);
    LanguageModel::of_recipe(&spec).unwrap();
    let long = recipe(folder, &["data.sequence=256"]);
    assert!(error(&long).contains("max_position_embeddings = 128, but data.sequence = 256"));

    let bytes = fs::read(&weights).unwrap();
    fs::write(&weights, &bytes[..bytes.len() - 1]).unwrap();
    assert!(error(&spec).contains("download it again, it is not complete"), "{}", error(&spec));
    fs::write(&weights, [bytes.as_slice(), b"more"].concat()).unwrap();
    assert!(error(&spec).contains("has 4 bytes after its last tensor"), "{}", error(&spec));
    fs::write(&weights, [0xff; 64]).unwrap();
    assert!(error(&spec).contains("is not a valid safetensors file"), "{}", error(&spec));
    fs::write(&weights, b"short").unwrap();
    assert!(error(&spec).contains("is not a valid safetensors file"), "{}", error(&spec));
    write_weights(&weights, &decoder, 1, |name| name != FINAL_NORM);
    assert!(error(&spec).contains("has no tensor model.norm.weight"), "{}", error(&spec));
    write_model(folder, &config_of("llama"), 1);
    let fewer = changed("llama", json!({"num_hidden_layers": 1})).to_string();
    fs::write(folder.join("config.json"), fewer).unwrap();
    let expected = "model.safetensors has a tensor model.layers.1.input_layernorm.weight, which its config.json does not use";
    assert!(error(&spec).contains(expected), "{}", error(&spec));
    let wider = changed("llama", json!({"intermediate_size": 41})).to_string();
    fs::write(folder.join("config.json"), wider).unwrap();
    let expected = "has model.layers.0.mlp.gate_proj.weight of shape [40, 24], but config.json requires [41, 24]";
    assert!(error(&spec).contains(expected), "{}", error(&spec));
}

#[test]
fn nothing_waits_for_a_pipe() {
    let folder = tempfile::tempdir().unwrap();
    let spec = recipe(folder.path(), &[]);
    for name in ["config.json", "model.safetensors"] {
        write_model(folder.path(), &config_of("llama"), 1);
        let file = folder.path().join(name);
        fs::remove_file(&file).unwrap();
        assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
        let error = LanguageModel::of_recipe(&spec).unwrap_err().to_string();
        assert!(error.ends_with(&format!("{name} is not a regular file")), "{error}");
        fs::remove_file(&file).unwrap();
    }
}

#[test]
fn the_digest_is_that_of_description_and_weights() {
    let folder = tempfile::tempdir().unwrap();
    let digest = |config: &Value, seed| {
        write_model(folder.path(), config, seed);
        LanguageModel::of_recipe(&recipe(folder.path(), &[])).unwrap().digest().unwrap()
    };
    let config = config_of("llama");
    let first = digest(&config, 1);
    assert_eq!((first.len(), digest(&config, 1) == first), (64, true));
    assert_ne!(digest(&config, 2), first);
    assert_ne!(digest(&changed("llama", json!({"rope_theta": 2e4})), 1), first);
}

#[test]
fn adapters_have_the_names_and_initial_values_of_peft() {
    let decoder = read(&config_of("llama"));
    let layout =
        AdapterLayout::new(&decoder, &adapter(&["q_proj", "layers.1.mlp.down_proj"])).unwrap();
    let network = layout.describe(&decoder);
    let names: Vec<&str> = network.parameters.iter().map(|tensor| tensor.name.as_str()).collect();
    let prefix = "base_model.model.model.layers";
    assert_eq!(names[0], format!("{prefix}.0.self_attn.q_proj.lora_A.weight"));
    assert_eq!(names[5], format!("{prefix}.1.mlp.down_proj.lora_B.weight"));
    assert_eq!((names.len(), layout.scale), (6, 2.0));
    let [a, b] = [&network.parameters[4], &network.parameters[5]];
    assert_eq!((&a.shape[..], &b.shape[..]), (&[4, 40][..], &[24, 4][..]));
    assert_eq!(
        (a.init, b.init),
        (Init::Uniform { bound: 40_f64.sqrt().recip() }, Init::Constant(0.0))
    );
    let blocks: Vec<_> =
        network.blocks.iter().map(|b| (b.name.as_str(), b.parameters.clone())).collect();
    assert_eq!(blocks, [("layers.0", 0..2), ("layers.1", 2..6)]);

    let all = AdapterLayout::new(&decoder, &adapter(&["all-linear"])).unwrap();
    assert_eq!(all.linears.len(), 2 * LinearKind::ALL.len());
    let error = AdapterLayout::new(&decoder, &adapter(&["q_proj", "query"])).unwrap_err();
    assert!(error.starts_with("adapter.targets: query is the name of no linear layer"), "{error}");
}

#[test]
fn all_weights_are_divided_into_embedding_layers_and_head() {
    for family in FAMILIES {
        let decoder = read(&config_of(family));
        let network = describe_whole(&decoder);
        let names: Vec<&str> = network.block_names().collect();
        assert_eq!(names, ["embedding", "layers.0", "layers.1"]);
        let covered: Vec<usize> = network.all_blocks().flat_map(|b| b.parameters.clone()).collect();
        assert!(covered.into_iter().eq(0..decoder.tensors().len()), "{family}");
    }
}
