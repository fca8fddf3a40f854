//! SIGHUP reloads the configuration. A file of its own: a signal reaches every task of its process.
#![cfg(feature = "gateway")]

use std::fs;
use std::process::Command;
use std::time::Duration;

use headway::config::{Reloader, Snapshot, load};
use tokio::sync::mpsc;
use tokio::time::timeout;

#[tokio::test]
async fn a_hangup_reloads_and_does_not_end_the_process() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("headway.yaml");
    fs::write(&file, "pools: [{ name: chat, models: [m], backends: [{ url: 'http://127.0.0.1:8000' }] }]\n").expect("written");
    let (sender, mut applied) = mpsc::unbounded_channel();
    let apply = move |snapshot: Snapshot| {
        _ = sender.send(snapshot);
        async { Ok::<(), String>(()) }
    };
    let _reloader = Reloader::start(Some(file.clone()), &load(&file).expect("valid"), apply).expect("signals can be handled");
    let sent = Command::new("kill").args(["-HUP", &std::process::id().to_string()]).status().expect("kill is there");
    assert!(sent.success());
    let snapshot = timeout(Duration::from_secs(10), applied.recv()).await.expect("in time").expect("the reloader lives");
    assert!(snapshot.models.contains_key("m"));
}
