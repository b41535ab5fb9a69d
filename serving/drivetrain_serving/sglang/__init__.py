"""SGLang's dialect: its routes over any engine."""
