//! A language model with LoRA adapters, trained on packed texts by real processes.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail loudly")]

#[path = "kit/language.rs"]
mod language;

use baton_job::exit;
use baton_proto::v1::watch_events_response::Kind;
use baton_tests::{Cluster, kill};
use language::{
    Files,
    models::{config_of, write_model},
};
use serde_json::Value;

#[tokio::test]
async fn adapters_end_with_the_same_bits_on_any_number_of_ranks() {
    let files = Files::new();
    files.write_tokenizer();
    // Several batches, so that every rank writes texts.
    let texts = "evaluation.generate={ samples=8, max_tokens=6, syntax='python' }";
    let short = || {
        let cluster = files.train(Cluster::new()).set("train.epochs=9");
        cluster.set("evaluation.batch=4").set(texts)
    };
    let mut alone = short();
    let one = alone.run_to_the_end(1).await;
    let written = texts_of(&alone);
    assert!(written.iter().all(|texts| texts.len() == 3), "{written:?}");
    let text = &written[0][0];
    assert!(text["prompt"].as_str().unwrap().starts_with('w') && text["text"] != "", "{text}");
    assert_ne!(written.first(), written.last(), "training changes what is written");
    let mut four = short();
    assert!(four.run_to_the_end(4).await == one, "4 ranks differ from one");
    assert_eq!(texts_of(&four), written);

    let mut cluster = short();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    let mut events = cluster.events().await;
    let first = events.next_of(Kind::Evaluated).await.message;
    events.next_of(Kind::Evaluated).await;
    let last = events.next_of(Kind::Evaluated).await.message;
    cluster.finish().await;
    assert!(cluster.newest_state() == one, "2 ranks differ from one");
    assert_eq!(texts_of(&cluster), written);
    let loss = |message: &str| -> f64 {
        assert!(
            message.contains("perplexity ") && message.contains("token accuracy "),
            "{message}"
        );
        assert!(message.contains("BLEU ") && message.contains("valid syntax "), "{message}");
        let loss = message.split("loss ").nth(1).and_then(|rest| rest.split([' ', ',']).next());
        loss.and_then(|loss| loss.parse().ok()).expect(message)
    };
    assert!(loss(&last) < 0.95 * loss(&first), "{first}; {last}");
    let exported = cluster.exported();
    assert_eq!(
        exported.len(),
        2 * 7 * 2,
        "two matrices for each of seven linear layers in two layers"
    );
    let name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight";
    assert_eq!(exported.get(name), Some(&vec![4, 40]), "{exported:?}");
}

/// The texts that the model wrote, of each evaluation.
fn texts_of(cluster: &Cluster) -> Vec<Vec<Value>> {
    let lines = std::fs::read_to_string(cluster.run_dir().join("metrics.jsonl")).unwrap();
    let points = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    points.filter_map(|point| Some(point["evaluation"]["texts"].as_array()?.clone())).collect()
}

#[tokio::test]
async fn adapters_of_a_quantised_model_continue_within_an_epoch_of_packed_texts_with_the_same_bits()
{
    let files = Files::new();
    let cluster = files.train(Cluster::endless()).set("checkpoint.every_steps=2");
    let cluster = cluster.set("adapter.base='nf4'");
    cluster.assert_same_bits_through_a_kill_and_with_other_ranks([2, 10, 16]).await;
}

#[tokio::test]
async fn a_spare_holds_the_frozen_weights_and_replaces_a_dead_rank_with_the_same_bits() {
    let files = Files::new();
    let mut cluster = files.train(Cluster::endless()).set("checkpoint.every_steps=2");
    cluster = cluster.set("adapter.base='nf4'").set("cluster.warm_spare=true");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    let mut events = cluster.events().await;
    events.saved_at(2).await;
    let is_loaded = || cluster.log("rank-spare").contains("the frozen weights are loaded");
    cluster.until("the spare is ready", async || is_loaded().then_some(())).await;
    let [_, killed, _spare] = cluster.rank_pids(0)[..] else { panic!("not two and a spare") };

    kill(killed);

    events.next_of(Kind::Recovered).await;
    assert_eq!(cluster.log("agent").matches("is_warm=true").count(), 1);
    let logs = [cluster.log("rank-0"), cluster.log("rank-1")].concat();
    assert_eq!(logs.matches("uses the weights that it has loaded").count(), 1, "{logs}");
    events.saved_at(10).await;
    cluster.end().await;
    cluster.assert_undisturbed_bits().await;
}

#[tokio::test]
async fn another_model_cannot_continue_a_run() {
    let files = Files::new();
    let mut cluster = files.train(Cluster::endless()).set("checkpoint.every_steps=2");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    cluster.events().await.saved_at(2).await;
    cluster.end().await;
    let before = cluster.newest_state();

    write_model(&files.path("model"), &config_of("gemma2"), 8);
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    let (coordinator, _) = cluster.finish().await;
    let log = cluster.log("coordinator");
    assert_eq!(coordinator.code(), Some(i32::from(exit::BAD_INPUT)), "{log}");
    assert!(log.contains("model is another one"), "{log}");
    assert!(cluster.newest_state() == before, "nothing is lost");
}
