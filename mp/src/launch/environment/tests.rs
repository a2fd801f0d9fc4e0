use super::*;

/// Detects from `NAME=value` words.
fn detect(vars: &str) -> Result<Option<Launch>> {
    Launch::from_vars(&|name| {
        let found =
            vars.split_whitespace().filter_map(|word| word.split_once('=')).find(|(key, _)| *key == name);
        found.map(|(_, value)| value.to_owned())
    })
}

fn launch(vars: &str) -> Launch {
    detect(vars).unwrap().expect("a launcher")
}

fn at(root: impl Into<String>) -> Root {
    Root::At(root.into())
}

fn error(vars: &str) -> String {
    match detect(vars) {
        Err(error @ Error::Launch { .. }) => error.to_string(),
        other => panic!("expected a launch error, got {other:?}"),
    }
}

#[test]
fn no_launcher_is_none() {
    assert_eq!(detect("").unwrap(), None);
    assert_eq!(detect("MASTER_ADDR=a MASTER_PORT=1 PATH=/bin RANK= WORLD_SIZE=").unwrap(), None);
}

#[test]
fn torchrun() {
    let vars = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=n1 MASTER_PORT=1234";
    let expected = Launch {
        rank: 5,
        size: 8,
        local_rank: 1,
        local_size: Some(4),
        root: at("n1:1234"),
        token: 0,
        launcher: Launcher::Env,
    };
    assert_eq!(launch(vars), expected);
}

#[test]
fn the_port_of_the_torchrun_agent_is_left_to_it() {
    let vars = "RANK=0 WORLD_SIZE=2 MASTER_ADDR=n1 MASTER_PORT=1234 TORCHELASTIC_RUN_ID=job";
    assert_eq!(launch(vars).root, at("n1:1234"));
    let agent = launch(&format!("{vars} TORCHELASTIC_USE_AGENT_STORE=True"));
    assert_eq!(agent.root, at(format!("n1:{}", port_of("job:1234"))));
    assert_ne!(agent.root, at("n1:1234"));
}

#[test]
fn by_hand_on_one_host() {
    let by_hand = launch("RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1");
    assert_eq!((by_hand.root, by_hand.local_rank, by_hand.local_size), (at("127.0.0.1:29500"), 1, None));
    assert_eq!(launch("RANK=1 WORLD_SIZE=2 MASTER_ADDR=n1").local_rank, 0);
    assert_eq!(launch("RANK=0 WORLD_SIZE=1").root, at("127.0.0.1:29500"));
}

#[test]
fn open_mpi() {
    let vars = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=3 \
                OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_NAMESPACE=prterun-n1-77@1";
    let found = launch(vars);
    assert_eq!((found.rank, found.size, found.local_rank, found.local_size), (3, 4, 3, Some(4)));
    assert_eq!(found.root, at(format!("127.0.0.1:{}", port_of("prterun-n1-77@1"))));
    assert_eq!(found.token, hash("prterun-n1-77@1"));
    assert_eq!(found.launcher, Launcher::OpenMpi);
    // mpirun inside a Slurm allocation, and variables set by hand, which win.
    assert_eq!(launch(&format!("{vars} SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1")).launcher, Launcher::OpenMpi);
    assert_eq!(launch(&format!("{vars} RANK=0 WORLD_SIZE=1")).launcher, Launcher::Env);
}

#[test]
fn hydra() {
    let vars = "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2";
    let found = launch(&format!("{vars} MASTER_PORT=7000"));
    assert_eq!((found.rank, found.size, found.local_rank, found.local_size), (1, 2, 1, Some(2)));
    assert_eq!((found.root, found.launcher), (at("127.0.0.1:7000"), Launcher::Pmi));
    assert!(error(vars).contains("set MASTER_PORT"));
    assert_eq!(launch("PMI_RANK=1 PMI_SIZE=2 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2 PALS_APID=x").local_rank, 1);
}

#[test]
fn hydra_by_pmi() {
    let pmi = |host: &str| Root::Pmi { host: Some(host.to_owned()) };
    let vars = "PMI_RANK=1 PMI_SIZE=4 PMI_FD=8 MPI_LOCALRANKID=1";
    let here = launch(&format!("{vars} MPI_LOCALNRANKS=4 MPIR_CVAR_CH3_INTERFACE_HOSTNAME=n1"));
    assert_eq!((here.root, here.token), (pmi("127.0.0.1"), 0));
    let several = format!("{vars} MPI_LOCALNRANKS=2");
    assert_eq!(launch(&several).root, Root::Pmi { host: None });
    assert_eq!(launch(&format!("{several} MPIR_CVAR_CH3_INTERFACE_HOSTNAME=n1")).root, pmi("n1"));
    assert_eq!(launch(&format!("{several} PMI_HOSTNAME=n3")).root, pmi("n3"));
    assert_eq!(launch(&format!("{several} MASTER_ADDR=n2")).root, pmi("n2"));
    assert_eq!(launch(&format!("{several} MASTER_ADDR=n2 MASTER_PORT=5")).root, at("n2:5"));
    // srun says everything by itself.
    assert!(matches!(launch(&format!("{SRUN} PMI_RANK=2 PMI_SIZE=4 PMI_FD=5")).root, Root::At(_)));
}

#[test]
fn launchers_that_do_not_tell_ranks() {
    assert!(error("PMI_PORT=n1:4000 PMI_ID=0").contains("-pmi-port"));
    assert!(error("PMIX_RANK=1 PMIX_NAMESPACE=prterun-n1-7@1").contains("--personality ompi"));
    assert_eq!(launch(&format!("{SRUN} PMIX_RANK=2")).launcher, Launcher::Slurm);
}

#[test]
fn open_mpi_by_file() {
    let vars = "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 PMIX_NAMESPACE=7 PMIX_SERVER_TMPDIR=/tmp/x";
    let one = format!("{vars} OMPI_COMM_WORLD_LOCAL_SIZE=2");
    let file = |vars: &str| match launch(vars).root {
        Root::File(path) => path,
        other => panic!("{other:?}"),
    };
    assert_eq!(file(&one).parent(), Some(Path::new("/tmp/x")));
    let keyed = format!("{one} OMPI_MCA_orte_precondition_transports=12-34");
    assert_ne!(file(&one), file(&keyed));
    assert_ne!(file(&one), file(&one.replace("NAMESPACE=7", "NAMESPACE=8")));
    assert_eq!(launch(&format!("{one} MASTER_PORT=5")).root, at("127.0.0.1:5"));
    assert!(error(&format!("{vars} OMPI_COMM_WORLD_LOCAL_SIZE=1")).contains("set MASTER_ADDR"));
}

const SRUN: &str = "SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=0 SLURM_JOB_ID=42 SLURM_STEP_ID=1 \
                    SLURM_JOB_NODELIST=other[1-9] SLURM_STEP_NODELIST=node[003-007,9],gpu1";

#[test]
fn srun() {
    let found = launch(SRUN);
    assert_eq!((found.rank, found.size, found.local_rank, found.local_size), (2, 4, 0, None));
    assert_eq!(found.root, at(format!("node003:{}", port_of("42.1"))));
    assert_eq!((found.token, found.launcher), (hash("42.1"), Launcher::Slurm));
    let one_node = launch(&format!("{SRUN} SLURM_STEP_NUM_NODES=1"));
    assert_eq!(one_node.root, at(format!("127.0.0.1:{}", port_of("42.1"))));
    assert_eq!(one_node.local_size, Some(4));
    assert_eq!(launch(&format!("{SRUN} MASTER_ADDR=m MASTER_PORT=9")).root, at("m:9"));
}

#[test]
fn srun_with_pmi_is_srun() {
    assert_eq!(launch(&format!("{SRUN} PMI_RANK=2 PMI_SIZE=4")).launcher, Launcher::Slurm);
    let hydra = format!("{SRUN} PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=0 MASTER_ADDR=n MASTER_PORT=1");
    assert_eq!(launch(&hydra).launcher, Launcher::Pmi);
}

#[test]
fn a_batch_script_is_no_rank() {
    assert_eq!(detect("SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_JOB_ID=1").unwrap(), None);
}

#[test]
fn several_hosts_need_an_address() {
    let ompi = "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=1";
    assert!(error(ompi).contains("set MASTER_ADDR"));
    assert!(error("RANK=0 WORLD_SIZE=2").contains("set MASTER_ADDR"));
}

#[test]
fn ipv6_is_bracketed() {
    for address in ["fe80::1", "[fe80::1]"] {
        let vars = format!("RANK=0 WORLD_SIZE=2 MASTER_PORT=5 MASTER_ADDR={address}");
        assert_eq!(launch(&vars).root, at("[fe80::1]:5"));
    }
    assert_eq!(launch("RANK=1 WORLD_SIZE=2 MASTER_ADDR=::1").local_rank, 1);
}

#[test]
fn token() {
    assert_eq!(launch(&format!("{SRUN} GDSYNC_JOB_TOKEN={}", u64::MAX)).token, u64::MAX);
    assert!(error(&format!("{SRUN} GDSYNC_JOB_TOKEN=-1")).contains("GDSYNC_JOB_TOKEN is '-1'"));
}

#[test]
fn errors_name_variable_and_value() {
    let cases = [
        ("RANK=1", "WORLD_SIZE is not set although RANK is '1'"),
        ("WORLD_SIZE=1", "RANK is not set although WORLD_SIZE is '1'"),
        ("OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK is not set"),
        ("PMI_RANK=0", "PMI_SIZE is not set"),
        ("RANK=x WORLD_SIZE=2", "RANK is 'x'"),
        ("RANK=-1 WORLD_SIZE=2", "RANK is '-1'"),
        ("RANK=2 WORLD_SIZE=2 MASTER_ADDR=a", "RANK is 2 but WORLD_SIZE is 2"),
        ("RANK=5 WORLD_SIZE=2", "RANK is 5 but WORLD_SIZE is 2"),
        ("RANK=0 WORLD_SIZE=0", "WORLD_SIZE is 0"),
        ("RANK=0 WORLD_SIZE=0 MASTER_ADDR=a", "WORLD_SIZE is 0"),
        ("RANK=0 WORLD_SIZE=65537 MASTER_ADDR=a", "WORLD_SIZE is 65537"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=65536", "MASTER_PORT is '65536'"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=0", "MASTER_PORT is '0'"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a:1", "MASTER_ADDR is 'a:1'"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a LOCAL_RANK=y", "LOCAL_RANK is 'y'"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a LOCAL_RANK=2 LOCAL_WORLD_SIZE=2", "local rank 2 of 2"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a LOCAL_WORLD_SIZE=3", "local rank 0 of 3"),
        (
            "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_JOB_ID=1 SLURM_STEP_NODELIST=n[1",
            "SLURM_STEP_NODELIST is 'n[1'",
        ),
    ];
    for (vars, expected) in cases {
        let message = error(vars);
        assert!(message.contains(expected), "{vars}: {message}");
    }
}

#[test]
fn derived_ports_are_stable_and_in_range() {
    // Reference values of FNV-1a-64.
    assert_eq!(hash(""), 0xcbf2_9ce4_8422_2325);
    assert_eq!(hash("a"), 0xaf63_dc4c_8601_ec8c);
    assert_eq!(hash("foobar"), 0x8594_4171_f739_67e8);
    for job in 0..1000 {
        assert!((20_000..30_000).contains(&port_of(&job.to_string())));
    }
}

#[test]
fn first_host_of_a_node_list() {
    let cases = [
        ("gpu1", Some("gpu1")),
        ("gpu1,gpu2", Some("gpu1")),
        ("node[003-007,9],gpu1", Some("node003")),
        ("node[9,003-007]", Some("node9")),
        ("node[12]", Some("node12")),
        ("rack[1-2]node[01-04]-ib,x", Some("rack1node01-ib")),
        ("n-a.example.org,b", Some("n-a.example.org")),
        ("", None),
        (",a", None),
        ("node[", None),
        ("node[1-2", None),
        ("node[]", None),
        ("node[-3]", None),
        ("node[a-b]", None),
        ("node]1[", None),
        ("a b", None),
    ];
    for (list, expected) in cases {
        assert_eq!(first_host(list).as_deref(), expected, "{list}");
    }
}
