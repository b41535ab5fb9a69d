"""The SGLang backend: ``sglang.Engine`` in a host process, behind drivetrain's own words."""
