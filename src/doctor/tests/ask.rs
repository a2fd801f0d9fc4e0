//! Processes that do not do what they should.

use std::process::Command;
use std::time::Duration;

use super::super::live::{Answer, Asked, CudaFacts, limit};

/// Longer than any test runs.
const LONG: Duration = Duration::from_secs(600);

fn ask(script: &str, limit: Duration) -> Answer<CudaFacts> {
    let mut shell = Command::new("sh");
    shell.args(["-c", script]);
    Asked::start(shell, limit).unwrap().answer()
}

const FACTS: &str = r#"echo '{"Facts":{"version":{"Ok":13000},"count":null,"gpus":[]}}';"#;

#[test]
fn what_was_said_is_kept_whatever_follows() {
    for (end, trouble) in [
        ("", None),
        ("echo a library says hello; echo '{\"Facts\":'; exit 0", None),
        ("echo '{\"Step\":\"cuInit\"}'; exit 3", Some("exit status: 3, in cuInit")),
        ("echo '{\"Step\":\"cuInit\"}'; kill -9 $$", Some("killed by signal 9, in cuInit")),
    ] {
        let answer = ask(&format!("{FACTS} {end}"), LONG);
        assert_eq!(answer.facts.version, Some(Ok(13000)), "{end}");
        match trouble {
            None => assert_eq!(answer.trouble, None, "{end}"),
            Some(words) => {
                assert!(answer.trouble.as_deref().unwrap().contains(words), "{:?}", answer.trouble)
            }
        }
    }
}

#[test]
fn a_process_that_says_nothing_is_not_waited_for() {
    let answer = ask("exec sleep 1000", Duration::from_millis(50));
    assert!(answer.trouble.unwrap().contains("no answer within 50ms"));
    assert_eq!(answer.facts.version, None);
}

#[test]
fn many_gpus_may_take_longer() {
    assert_eq!([0, 1, 2, 8].map(|gpus| limit(gpus).as_secs()), [4, 4, 5, 11]);
}

#[test]
fn a_pipe_that_a_grandchild_keeps_is_not_waited_for() {
    let answer = ask("sleep 20 & exit 0", Duration::from_millis(50));
    assert!(answer.trouble.unwrap().contains("no answer"));
}
